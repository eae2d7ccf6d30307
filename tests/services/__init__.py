"""Real servers on loopback for the tests, and a proxy before them through which things go wrong."""
