"""Typed configuration: schema, loading, validation. Imports no torch."""
