"""The API does what its description says, whatever it is asked: requests made by schemathesis from that description.

A real api, master and node answer them (the node's engine is the simulated one). Ids are not left to chance alone:
they are those of sandboxes that run, are paused, have ended, belong to somebody else or never were. `GREENROOM_FUZZ=N`
looks further: N requests for each operation instead of some, and others in each run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks as contract

from greenroom.api.describe import paths
from greenroom.api.e2b.openapi import UNSUPPORTED, document
from greenroom.config import ClaimsConfig, PoolsConfig, VmConfig
from tests.support.cluster import QUICK, Cluster, cluster
from tests.support.role_process import RoleProcess

pytestmark = pytest.mark.slow

MORE = int(os.environ.get("GREENROOM_FUZZ", "0"))
CONFIG = msgspec.structs.replace(
    QUICK,
    vm=VmConfig(engine="simulated"),
    pools=PoolsConfig(default_target=20),
    claims=ClaimsConfig(queue_wait=5.0, handover_deadline=5.0),
)
DOCUMENT = document(paths())
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [
    pytest.param(method.upper(), path, UNSUPPORTED not in said, id=f"{method.upper()} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method, said in methods.items()
]
SUPPORTED = [each for each in OPERATIONS if each.values[2]]
REFUSED = [each for each in OPERATIONS if not each.values[2]]
SAID = {
    (method.upper(), path): said
    for path, methods in DOCUMENT["paths"].items()
    for method, said in methods.items()
}
CHECKS = [
    contract.status_code_conformance,
    contract.content_type_conformance,
    contract.response_headers_conformance,
    contract.response_schema_conformance,
    contract.negative_data_rejection,
]
KINDS = ("running", "paused", "ended", "foreign", "snapshot", "any")


class World:
    """The api under test and what there is to name in a request."""

    def __init__(self, made: Cluster, api: RoleProcess) -> None:
        self.url = api.url
        self.session = self._session(made.key()[1])
        self.stranger = self._session(made.key()[1])
        self._known: dict[str, str] = {}

    def _session(self, secret: str) -> requests.Session:
        session = requests.Session()
        session.trust_env = False
        session.headers["X-API-Key"] = secret
        return session

    def close(self) -> None:
        """Let the connections go."""
        self.session.close()
        self.stranger.close()

    def ask(
        self, session: requests.Session, method: str, path: str, body: object = None
    ) -> requests.Response:
        """One request."""
        return session.request(method, self.url + path, json=body, timeout=30)

    def id_of(self, kind: str) -> str:
        """The id of a sandbox (or a snapshot) in this state; made anew when the last one is not in it any more."""
        found = self._known.get(kind, "")
        if not found or not self._is(kind, found):
            found = self._known[kind] = self._made(kind)
        return found

    def _is(self, kind: str, thing: str) -> bool:
        if kind == "snapshot":
            listed = self.ask(self.session, "GET", "/snapshots").json()
            return thing in [each["snapshotID"] for each in listed]
        session = self.stranger if kind == "foreign" else self.session
        answer = self.ask(session, "GET", f"/sandboxes/{thing}")
        return answer.json().get("state", "ended") == {"foreign": "running"}.get(kind, kind)

    def _made(self, kind: str) -> str:
        if kind == "snapshot":
            answer = self.ask(self.session, "POST", f"/sandboxes/{self.id_of('running')}/snapshots")
            assert answer.status_code == 201, answer.text
            return str(answer.json()["snapshotID"])
        session = self.stranger if kind == "foreign" else self.session
        answer = self.ask(session, "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 3600})
        assert answer.status_code == 201, answer.text
        sandbox = str(answer.json()["sandboxID"])
        if kind == "paused":
            assert self.ask(session, "POST", f"/sandboxes/{sandbox}/pause").status_code == 204
        elif kind == "ended":
            assert self.ask(session, "DELETE", f"/sandboxes/{sandbox}").status_code == 204
        return sandbox

    def clean(self, answer: schemathesis.Response) -> None:
        """End the sandboxes that an answer tells of, if it made some."""
        if answer.status_code == 201:
            body = answer.json()
            for entry in body if isinstance(body, list) else [body]:
                sandbox = entry.get("sandbox") or entry
                if (name := sandbox.get("sandboxID")) not in (None, *self._known.values()):
                    self.ask(self.session, "DELETE", f"/sandboxes/{name}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with cluster(tmp_path_factory.mktemp("contract")) as made:
        master = made.master(config=CONFIG)
        made.stack.enter_context(RoleProcess(made.spec("node", config=CONFIG, master_urls=[master.url])))
        found = World(made, made.api(config=CONFIG))
        try:
            yield found
        finally:
            found.close()


NOT_HTTP = "Invalid HTTP request received."
"""What the HTTP server says of headers that are none, before any of ours sees the request."""


def search(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=MORE or examples,
        derandomize=not MORE,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def make_likely(world: World, case: schemathesis.Case, data: st.DataObject) -> None:
    """Now and then put in what chance alone never finds: names that are there, times within their bounds."""
    likely: dict[str, st.SearchStrategy[object]] = {
        "templateID": st.sampled_from(["base", "snapshot"]),
        "snapshotID": st.just("snapshot"),
        "alias": st.just("base"),
        "timeout": st.integers(1, 3600),
        "count": st.integers(1, 3),
        "network": st.none(),
        "iam": st.none(),
        "volumeMounts": st.none(),
        "autoPauseMemory": st.none(),
    }
    for holder in (case.body, case.path_parameters):
        if isinstance(holder, dict):
            for name in sorted(holder.keys() & likely.keys()):
                if data.draw(st.integers(0, 3), f"likely {name}"):
                    found = data.draw(likely[name], name)
                    holder[name] = world.id_of("snapshot") if found == "snapshot" else found


def judge(world: World, case: schemathesis.Case) -> schemathesis.Response:
    """Send one request; raise when the answer is not what the description says."""
    answer = case.call(base_url=world.url, session=world.session)
    world.clean(answer)
    if (answer.status_code, answer.text) == (400, NOT_HTTP):
        return answer
    case.validate_response(answer, checks=CHECKS)
    assert answer.status_code < 500 or answer.status_code in (501, 503), answer.text
    if answer.status_code >= 400:
        body = answer.json()
        assert body.keys() == {"code", "message"}
        assert body["code"] == answer.status_code
        assert "Traceback" not in body["message"]
    return answer


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize(("method", "path", "_supported"), SUPPORTED)
def test_any_request_is_answered_as_described(
    world: World, method: str, path: str, _supported: bool, mode: GenerationMode
) -> None:
    operation = SCHEMA[path][method]
    if mode is GenerationMode.NEGATIVE and not SAID[method, path].keys() & {"parameters", "requestBody"}:
        mode = GenerationMode.POSITIVE  # it takes nothing that could be wrong
    named = "{id}" in path

    @search(20)
    @hypothesis.given(data=st.data())
    def any_request(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(KINDS), "kind of id") if named else "any"
        given = {} if kind == "any" else {"path_parameters": {"id": world.id_of(kind)}}
        case = data.draw(operation.as_strategy(mode, **given), "request")
        if mode is GenerationMode.POSITIVE:
            make_likely(world, case, data)
        judge(world, case)

    any_request()


@pytest.mark.parametrize(("method", "path", "_supported"), REFUSED)
def test_what_is_not_supported_is_refused_as_described(
    world: World, method: str, path: str, _supported: bool
) -> None:
    operation = SCHEMA[path][method]

    @search(3)
    @hypothesis.given(case=operation.as_strategy())
    def any_request(case: schemathesis.Case) -> None:
        assert judge(world, case).status_code == 501

    any_request()


@pytest.mark.parametrize(("method", "path", "_supported"), OPERATIONS)
def test_without_a_key_nothing_is_told(world: World, method: str, path: str, _supported: bool) -> None:
    needs_key = SAID[method, path].get("security") != []
    url = world.url + path.replace("{", "").replace("}", "")
    for headers in (
        {},
        {"X-API-Key": "e2b_" + "0" * 40},
        {"X-API-Key": "nonsense"},
        {"Authorization": "Bearer x"},
    ):
        answer = requests.request(method, url, headers=headers, timeout=30)
        assert answer.status_code == (401 if needs_key else 200)
        if needs_key:
            assert answer.json().keys() == {"code", "message"}
            assert "WWW-Authenticate" in answer.headers


@pytest.mark.parametrize("path", sorted(DOCUMENT["paths"]))
def test_a_method_that_a_path_does_not_have(world: World, path: str) -> None:
    here = {method.upper() for method in DOCUMENT["paths"][path]}
    url = world.url + path.format(id="i" + "y" * 19, alias="base", hash="0" * 64, build="b", tag="t")
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "QUERY"} - here:
        answer = world.session.request(method, url, timeout=30)
        assert answer.status_code == 405
        assert answer.json().keys() == {"code", "message"}
        told = {"OPTIONS", *here, *(["HEAD"] if "GET" in here else [])}
        assert set(answer.headers["Allow"].split(", ")) == told
    assert world.session.options(url, timeout=30).status_code == 204
