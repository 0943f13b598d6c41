"""The only door to a host: one connection, the agent, and its events."""
