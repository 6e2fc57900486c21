"""Object stores for tests: real servers, hostile ones, and keepers that work when told to."""
