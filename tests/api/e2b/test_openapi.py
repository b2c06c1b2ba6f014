"""The description of the API cannot say anything else than what is served: all of it is compared with the table."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import httpx
import jsonschema_rs
import pytest

from greenroom.api.describe import paths
from greenroom.api.e2b.openapi import OPERATIONS, PATH, UNSUPPORTED, described, document, known
from greenroom.api.e2b.resources import Resource, Unsupported, application
from greenroom.wire.metrics import READERS

TABLE = paths()
DOCUMENT = document(TABLE)
DESCRIBED = {
    (method.upper(), path): operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


def test_what_is_served_is_described_and_the_other_way_round():
    app = application(described(dict(TABLE)), verifier=object())
    served = set()
    for route in app.routes:
        assert isinstance(route.endpoint, Resource)
        methods = route.endpoint._handlers.keys() - {"HEAD"}
        served |= {(method, re.sub(r":\w+\}", "}", route.path)) for method in methods}
    # Metrics are for roles, on the process's own address: no part of what clients are offered.
    assert READERS
    assert served - DESCRIBED.keys() == {("GET", "/metrics")}
    assert DESCRIBED.keys() - served == set()


def test_every_supported_operation_says_what_it_takes_and_answers():
    for each in known(TABLE):
        if each.supported:
            assert each.operation is not None, (
                f"{each.method} {each.path} is served and not described: give it an entry in "
                "greenroom/api/e2b/operations.py"
            )
    supported = {(each.method, each.path) for each in known(TABLE) if each.supported}
    assert OPERATIONS.keys() - supported == set()


def test_what_is_not_supported_is_marked_and_says_501():
    for path, methods in TABLE.items():
        for method, handler in methods.items():
            operation = DESCRIBED[method, re.sub(r":\w+\}", "}", path)]
            refused = isinstance(handler, Unsupported)
            assert (UNSUPPORTED in operation) is refused
            if refused:
                assert operation[UNSUPPORTED] == handler.what
                assert {"401", "501"} <= operation["responses"].keys()
                assert not any(status.startswith("2") for status in operation["responses"])
            else:
                assert any(status.startswith("2") for status in operation["responses"])


def test_docstrings_name_the_path_that_they_are_about():
    for path, methods in TABLE.items():
        for method, handler in methods.items():
            if not isinstance(handler, Unsupported):
                named = handler.__doc__.split("`")[1].partition("?")[0]
                verb, _, told = named.partition(" ")
                variants = {told, told.replace("(/v2)", ""), told.replace("(/v2)", "/v2")}
                assert (verb, re.sub(r":\w+\}", "}", path)) in {(method, variant) for variant in variants}


def test_an_operation_without_a_description_is_served_all_the_same():
    async def new(_request):
        """`GET /new`: what a colleague has just added."""

    said = document({"/new": {"GET": new}})["paths"]["/new"]["get"]
    assert said["summary"] == "what a colleague has just added."
    assert {"401", "500", "503", "default"} == said["responses"].keys()


def test_ids_are_unique_and_all_references_lead_somewhere():
    ids = [operation["operationId"] for operation in DESCRIBED.values()]
    assert len(ids) == len(set(ids))
    text = json.dumps(DOCUMENT)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named == DOCUMENT["components"]["schemas"].keys()
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def test_path_parameters_are_those_of_the_path():
    for (_, path), operation in DESCRIBED.items():
        told = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
        assert told == set(re.findall(r"\{(\w+)\}", path))


def test_errors_have_one_form_in_every_operation():
    reference = {"$ref": "#/components/schemas/ErrorBody"}
    for operation in DESCRIBED.values():
        for status, answer in operation["responses"].items():
            if status[0] in "45":
                assert answer["content"] == {"application/json": {"schema": reference}}
    assert set(DOCUMENT["components"]["schemas"]["ErrorBody"]["required"]) == {"code", "message"}


def test_it_is_served_without_a_key(api):
    answer = httpx.get(api.url + PATH, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == json.loads(json.dumps(DOCUMENT))


@pytest.mark.parametrize(("arguments", "begins"), [((), "{"), (("--table",), "| call |")])
def test_the_command_prints_it(arguments, begins):
    done = subprocess.run(
        [sys.executable, "-m", "greenroom.api.describe", *arguments],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith(begins)
    assert done.stderr == ""
    if not arguments:
        assert json.loads(done.stdout) == json.loads(json.dumps(DOCUMENT))
