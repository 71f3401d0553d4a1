//! Authentication and authorization.

mod adoption;
mod credentials;
mod cross_site;
mod isolation;
mod keys;
mod operator;
mod revocation;
mod rules;
mod session_tokens;
mod streams;
