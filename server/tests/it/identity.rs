//! Who is who, and who may do what.

mod isolation;
mod keys;
mod roles;
mod rules;
