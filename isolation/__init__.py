"""One filesystem, process tree and verifier per episode, from Linux namespaces and overlayfs; standard library only."""
