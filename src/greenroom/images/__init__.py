"""Images: what a microVM boots from. Built once per machine into the cache, shared by every state directory.

`base.ensure` is the way in. An image is a directory named by the hash of everything that went into it
(recipe, package list, guest files, agent source), published by rename, so a half-built one is never seen and
an interrupted build goes on with the parts that were finished (root file system, kernel).
"""
