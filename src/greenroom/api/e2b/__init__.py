"""The E2B dialect: the control API that the unmodified E2B SDKs call."""
