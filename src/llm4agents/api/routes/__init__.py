"""The routes of /v1, by what they are about."""
