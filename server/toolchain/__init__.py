"""The verifier's toolchain: uv, Python interpreters and wheels that a task's test.sh would download."""
