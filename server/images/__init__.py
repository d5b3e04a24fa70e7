"""Task environments: what a task's image holds, as read-only layers in a store, without Docker."""
