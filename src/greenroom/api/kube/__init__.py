"""Kubernetes' API conventions: objects, verbs and errors as kubectl and client libraries expect them."""
