"""What a config will need before anything is started: memory, time, the best layout. Imports no torch."""
