//! `/metrics`: every promised name, explained and typed, there from the start.
