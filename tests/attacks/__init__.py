"""What an agent may try to be graded better than it worked, to read the tests, or to disturb others' grades."""
