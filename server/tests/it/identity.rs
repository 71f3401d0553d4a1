//! Authentication and authorization.

mod adoption;
mod cross_site;
mod isolation;
mod keys;
mod operator;
mod revocation;
mod roles;
mod rules;
