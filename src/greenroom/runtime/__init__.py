"""VM engines: one interface (`engine.Runtime`), two engines (`qemu`, `simulated`).

An engine turns an image into a *golden* snapshot once, and a golden into as many VMs as are asked for. It owns
everything on the host that a VM consists of (process, namespace, tap, overlay, cgroup, uid) and can account
for each: an owner record is written before anything is made (`slots`), and `sweep` removes what has none.
"""
