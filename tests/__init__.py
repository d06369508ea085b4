"""The tests: a folder for each room, `support` for what they share, `attacks` for snapshots to be refused."""
