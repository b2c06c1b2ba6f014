"""The four ways to change an object in part: JSON patch, merge patch, strategic merge patch, server-side apply.

All are pure functions from an object and a patch to a new object; what they are given stays as it is.
"""
