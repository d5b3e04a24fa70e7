"""`make bench`: what the server costs, beside what the same costs without it. docs/performance.md says how."""
