//! Authentication and authorization.

mod adoption;
mod isolation;
mod keys;
mod roles;
mod rules;
