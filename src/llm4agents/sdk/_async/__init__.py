"""The client, written once, asynchronously."""
