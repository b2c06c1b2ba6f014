"""Test doubles of the roles: processes that start and stop as the roles do, and do none of their work."""
