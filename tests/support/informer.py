"""What controllers do to know all objects of a kind: list, watch from there, and list anew when that is not possible.

As client-go's reflector does it, on the Kubernetes client for Python, whose own `Watch` lists nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.support.waiting import until_true

AGAIN = 0.05
"""Seconds before an api that did not answer is asked again."""
SILENCE = 5
"""Seconds for which one watch is asked."""


class Informer:
    """The objects of a kind in a namespace, kept current by a thread for the length of a block."""

    def __init__(self, api: client.CustomObjectsApi, *place: str) -> None:
        self._api = api
        self._place = place
        self.objects: dict[str, dict[str, Any]] = {}
        """By name, as they are now."""
        self.told: dict[str, list[str]] = {}
        """What an event handler would have been told of each."""
        self.lists = 0
        """How often all of them were listed."""
        self._watch = watch.Watch()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Informer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._watch.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def until(self, condition: Callable[[Mapping[str, dict[str, Any]]], bool]) -> None:
        """Wait until this holds of the objects."""
        until_true(lambda: self._failure is not None or condition(dict(self.objects)))
        assert self._failure is None, self._failure

    def _run(self) -> None:
        try:
            version = ""
            while not self._stopped.is_set():
                try:
                    version = self._follow(version) if version else self._list()
                except ApiException as error:
                    # 410: it goes on from nowhere that this api knows.
                    version = "" if error.status == 410 else version
                    self._stopped.wait(AGAIN)
                except HTTPError:
                    self._stopped.wait(AGAIN)
        except BaseException as error:
            self._failure = error

    def _list(self) -> str:
        found = self._api.list_namespaced_custom_object(*self._place, _request_timeout=30)
        self.lists += 1
        listed = {each["metadata"]["name"]: each for each in found["items"]}
        for name in self.objects.keys() - listed.keys():
            self._take("DELETED", self.objects[name])
        for each in listed.values():
            self._take("MODIFIED", each)
        return str(found["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> str:
        for event in self._watch.stream(
            self._api.list_namespaced_custom_object, *self._place,
            resource_version=version, timeout_seconds=SILENCE, allow_watch_bookmarks=True,
        ):  # fmt: skip
            obj = event["object"]
            if event["type"] != "BOOKMARK":
                self._take(event["type"], obj)
            version = str(obj["metadata"]["resourceVersion"])
        return version

    def _take(self, kind: str, obj: dict[str, Any]) -> None:
        name = obj["metadata"]["name"]
        before = self.objects.get(name)
        if kind == "DELETED":
            self.objects.pop(name, None)
        elif before is None:
            kind = "ADDED"
            self.objects[name] = obj
        else:
            kind = "MODIFIED"
            self.objects[name] = obj
        if before != self.objects.get(name):
            self.told.setdefault(name, []).append(kind)
