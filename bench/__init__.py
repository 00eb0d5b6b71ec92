"""Measures the client: beside other tools of the field, and by itself."""
