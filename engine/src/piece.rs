//! Parts of results. Pure.

/// A key as a part of a JSON pointer (RFC 6901).
pub(crate) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}
