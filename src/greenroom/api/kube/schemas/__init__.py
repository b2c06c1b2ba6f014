"""The structural OpenAPI v3 schema of every kind, written as data: what may be in an object, and what it means.

Validation, pruning, defaults, `kubectl explain`, the merge rules of patches and of server-side apply all go by these.
Structural means that every node has a `type` (or `x-kubernetes-int-or-string`, `x-kubernetes-preserve-unknown-fields`);
see "Extend the Kubernetes API with CustomResourceDefinitions" in Kubernetes' documentation.
"""
