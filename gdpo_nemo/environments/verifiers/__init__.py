"""Environment packages for the library verifiers, which play their episodes in a process of their own."""
