"""Modules that the commands at the root import, in packages by subject; docs/architecture.md lists the packages."""
