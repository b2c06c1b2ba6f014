"""What rules allow, in both dialects; and how they are written."""

from __future__ import annotations

import httpx
import pytest

from greenroom.api.e2b.permissions import OPERATIONS
from greenroom.api.e2b.routes import Dialect
from greenroom.api.rules import Action, Caller, of_key, refusal
from greenroom.errors import BadRequest
from greenroom.store.keys import create_api_key, rule_of, text_of
from greenroom.store.records import EVERYTHING, ApiKey, Rule
from tests.support.cluster import Cluster, http


def caller(*rules: str, owner: str = "a") -> Caller:
    key = ApiKey(
        key_id="1",
        name="ci",
        owner=owner,
        created_at=1.0,
        hint="0000",
        rules=[rule_of(text, owner) for text in rules],
    )
    return of_key(key)


def action(verb: str = "list", resource: str = "sandboxes", namespace: str = "a", part: str = "") -> Action:
    return Action(verb=verb, group="agents.x-k8s.io", resource=resource, namespace=namespace, part=part)


def test_a_key_without_rules_may_do_everything_in_its_own_namespace_alone() -> None:
    plain = caller()
    assert plain.may(action("create"))
    assert plain.may(action("create", part="pause"))
    assert not plain.may(action(namespace="b"))
    assert not plain.may(action(namespace=""))
    assert plain.namespaces() == {"a"}


def test_namespaces_are_seen_by_those_who_may_do_something_there() -> None:
    def see(who: Caller, namespace: str, verb: str = "get") -> bool:
        return who.may(Action(verb=verb, resource="namespaces", namespace=namespace))

    plain, viewer = caller(), caller("get sandboxes in b,c")
    assert [see(plain, each) for each in ("a", "b", "")] == [True, False, True]
    assert [see(viewer, each) for each in ("a", "b", "c")] == [False, True, True]
    assert see(viewer, "", "list")
    assert see(viewer, "", "watch")
    assert not see(viewer, "b", "delete")
    nobody = Caller(user="x", owner="a", rules=[])
    assert not see(nobody, "", "list")
    assert not plain.may(Action(verb="list", group="x", resource="namespaces"))


def test_what_is_no_resource_anybody_may_read() -> None:
    assert caller("get pods").may(Action(verb="get", path="/openapi/v3"))
    assert not caller().may(Action(verb="post", path="/openapi/v3"))


def test_the_operators_key_may_do_everything_everywhere() -> None:
    key = ApiKey(key_id="1", name="x", owner="a", created_at=1.0, hint="0", rules=[EVERYTHING])
    assert key.admin
    assert of_key(key).may(action("delete", namespace=""))
    assert of_key(key).namespaces() is None


@pytest.mark.parametrize(
    ("rules", "reads", "writes"),
    [
        ((), True, False),
        (("* *",), True, False),
        (("* * in a,b",), True, False),
        (("get,list *",), True, False),
        (("* resourcequotas",), True, True),
        (("create,get resourcequotas", "* *"), True, True),
        (("* * in *",), True, True),
        (("* sandboxes",), False, False),
    ],
)
def test_who_is_bounded_by_a_quota_does_not_set_it_unless_a_rule_names_it(
    rules: tuple[str, ...], reads: bool, writes: bool
) -> None:
    asked = caller(*rules)
    for verb, wanted in (("get", reads), ("create", writes)):
        assert asked.may(Action(verb=verb, resource="resourcequotas", namespace="a")) == wanted, verb
    if not writes:
        for verb in ("update", "patch", "delete", "deletecollection"):
            assert not asked.may(Action(verb=verb, resource="resourcequotas", namespace="a"))
            assert not asked.may(Action(verb=verb, resource="resourcequotas", namespace="a", part="status"))


def test_rules_name_verbs_resources_and_namespaces() -> None:
    viewer = caller("get,list,watch sandboxes,sandboxwarmpools.extensions.agents.x-k8s.io in a,b")
    assert viewer.may(action("watch", namespace="b"))
    assert not viewer.may(action("delete"))
    assert not viewer.may(action(namespace="c"))
    pools = Action(verb="get", group="extensions.agents.x-k8s.io", resource="sandboxwarmpools", namespace="a")
    assert viewer.may(pools)
    assert not viewer.may(Action(verb="get", group="x", resource="sandboxwarmpools", namespace="a"))


@pytest.mark.parametrize(
    ("resource", "whole", "pause", "fork"),
    [
        ("sandboxes", True, False, False),
        ("sandboxes/pause", False, True, False),
        ("sandboxes/*", False, True, True),
        ("*", True, True, True),
        ("*/fork", False, False, True),
    ],
)
def test_subresources_are_named_for_themselves(resource: str, whole: bool, pause: bool, fork: bool) -> None:
    asked = caller(f"create {resource}")
    assert [asked.may(action("create", part=part)) for part in ("", "pause", "fork")] == [whole, pause, fork]


def test_refusals_are_in_kubernetes_words() -> None:
    assert refusal(caller(), action(namespace="x")) == (
        'User "key:ci" cannot list resource "sandboxes" in API group "agents.x-k8s.io" in the namespace "x"'
    )
    assert refusal(caller(), action("create", namespace="", part="pause")).endswith(
        'resource "sandboxes/pause" in API group "agents.x-k8s.io" at the cluster scope'
    )


def test_rules_are_read_as_they_are_shown() -> None:
    rule = rule_of("get,list sandboxes", "team-a")
    assert rule == Rule(namespaces=["team-a"], resources=["sandboxes"], verbs=["get", "list"])
    assert rule_of(text_of(rule), "other") == rule
    assert text_of(EVERYTHING) == "* * in *"
    # Owners of older keys can have what no namespace can.
    assert rule_of("* *", "old_owner").namespaces == ["old_owner"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "get",
        "get sandboxes on a",
        "GET sandboxes",
        "get Sandboxes",
        "get a b c",
        "* * in A",
        "get s in -a",
    ],
)
def test_what_is_no_rule_is_told(text: str) -> None:
    with pytest.raises(BadRequest):
        rule_of(text, "a")


def test_every_operation_that_is_named_is_one(api_paths: dict[str, dict[str, object]]) -> None:
    for method, path in OPERATIONS:
        assert method in api_paths[path], (method, path)
    served = {
        (method, path)
        for path, methods in api_paths.items()
        for method, handler in methods.items()
        if type(handler).__name__ != "Unsupported"
    }
    # For these a key is enough: they are the same for everybody.
    assert served - OPERATIONS.keys() == {("GET", "/templates"), ("GET", "/templates/aliases/{alias:path}")}


@pytest.fixture
def api_paths() -> dict[str, dict[str, object]]:
    from greenroom.api.describe import paths

    assert Dialect
    return {path: dict(methods) for path, methods in paths().items()}


def test_e2b_calls_are_checked_by_the_same_rules(plane: Cluster) -> None:
    rules = [rule_of("list,get sandboxes", "viewer")]
    _, secret = plane.stored(lambda store: create_api_key(store, "viewer", "viewer", rules))
    with http(plane.apis[0], secret) as client:
        assert client.get("/sandboxes").status_code == 200
        assert client.get("/templates").status_code == 200
        refused = client.post("/sandboxes", json={"templateID": "base"})
        assert refused.status_code == 403
        assert refused.json()["code"] == 403
        assert 'cannot create resource "sandboxes"' in refused.json()["message"]
        for method, path in (
            ("DELETE", "/sandboxes/i" + "a" * 19),
            ("POST", f"/sandboxes/i{'a' * 19}/pause"),
        ):
            assert client.request(method, path).status_code == 403


def test_the_kubernetes_dialect_knows_keys_as_bearer_tokens(plane: Cluster) -> None:
    _, secret = plane.key("kube-team")
    with http(plane.apis[0], None) as client:
        listing = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{}/sandboxwarmpools"
        refused = client.get(listing.format("kube-team"))
        assert (refused.status_code, refused.json()["reason"]) == (401, "Unauthorized")
        client.headers["Authorization"] = f"Bearer {secret}"
        assert client.get(listing.format("kube-team")).json()["kind"] == "SandboxWarmPoolList"
        other = client.get(listing.format("elsewhere"))
        assert (other.status_code, other.json()["reason"]) == (403, "Forbidden")
        assert other.json()["message"] == (
            'sandboxwarmpools.extensions.agents.x-k8s.io is forbidden: User "key:test" cannot list resource '
            '"sandboxwarmpools" in API group "extensions.agents.x-k8s.io" in the namespace "elsewhere"'
        )
        everywhere = client.get("/apis/extensions.agents.x-k8s.io/v1beta1/sandboxwarmpools")
        assert everywhere.status_code == 403
        assert everywhere.json()["message"].endswith("at the cluster scope")
        assert client.get("/apis").json()["kind"] == "APIGroupList"
        _whoami(client)


def _whoami(client: httpx.Client) -> None:
    me = client.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", json={})
    assert me.status_code == 201
    assert me.json()["status"]["userInfo"]["username"] == "key:test"


def test_headers_of_a_front_proxy_name_nobody_on_the_ordinary_port(plane: Cluster) -> None:
    _, secret = plane.key()
    headers = {"X-Remote-User": "admin", "X-Remote-Group": "system:masters"}
    listing = "/apis/extensions.agents.x-k8s.io/v1beta1/sandboxwarmpools"
    with http(plane.apis[0], None) as client:
        assert client.get(listing, headers=headers).status_code == 401
        both = {**headers, "Authorization": f"Bearer {secret}"}
        assert client.get(listing, headers=both).status_code == 403


def test_health_is_for_anybody_and_tells_when_all_is_seen(plane: Cluster) -> None:
    with http(plane.apis[0], None) as client:
        assert client.get("/livez").text == "ok"
        assert client.get("/readyz").status_code == 200
        assert client.get("/health").status_code == 200
