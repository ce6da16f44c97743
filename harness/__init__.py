"""Everything that is never run by hand, in packages by subject; docs/architecture.md is their map."""
