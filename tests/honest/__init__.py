"""Honest work of the kinds that Terminal-Bench 2 asks for, which no hardening of the verifier may break."""
