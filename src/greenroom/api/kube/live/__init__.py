"""Kinds whose objects are stored nowhere: they are made from what the nodes tell of their sandboxes."""
