"""Rules of keys are made of verbs and resources that there are."""

from __future__ import annotations

import pytest

from greenroom.api.e2b.permissions import OPERATIONS
from greenroom.api.kube.rulewords import check_words
from greenroom.errors import BadRequest
from greenroom.store.keys import rule_of


@pytest.mark.parametrize(
    "text",
    [
        "* *",
        "get,list,watch sandboxes,sandboxwarmpools",
        "create sandboxes/pause,sandboxes/*,*/fork",
        "patch sandboxwarmpools/scale,sandboxes.agents.x-k8s.io/status",
        "get resourcequotas,events,namespaces,nodeinventories.sandbox.greenroom.dev",
        "deletecollection sandboxclaims.extensions.agents.x-k8s.io",
    ],
)
def test_words_that_there_are(text: str) -> None:
    check_words(rule_of(text, "a"))


def test_all_that_the_other_dialect_asks_for_can_be_written() -> None:
    for verb, part in OPERATIONS.values():
        check_words(rule_of(f"{verb} sandboxes/{part}" if part else f"{verb} sandboxes", "a"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lst sandboxes", "no verb 'lst'"),
        ("get,reed sandboxes", "deletecollection"),
        ("get sandboxs", "no resource 'sandboxs'"),
        ("get sandbox", "sandboxwarmpools/scale"),
        ("create sandboxes/pauze", "sandboxes/pause"),
        ("get sandboxes.example.com", "no resource"),
        ("get */nothing", "no resource"),
        ("get pods", "no resource"),
    ],
)
def test_words_that_there_are_not_are_refused_with_those_there_are(text: str, told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        check_words(rule_of(text, "a"))
