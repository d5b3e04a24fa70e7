"""What the tests share: tasks to play with, a real server process, and the proof that nothing is left of an episode."""
