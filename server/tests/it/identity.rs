//! Authentication and authorization.

mod isolation;
mod keys;
mod roles;
mod rules;
