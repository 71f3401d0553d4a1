//! The identity of a call's requester in its stored envelope. The authentication method and roles
//! of the two usual identities, a key with the role agent and the operator, are implied by
//! `subject_to_rules`. Attributes (the key's id at least) are stored beside it.

use std::borrow::Cow;
use std::sync::Arc;

use toolcrib::domain::call::Origin;
use toolcrib::domain::caller::{AuthMethod, CallerAttributes, Role, RoleSet};
use toolcrib::ports::store::StoreError;

/// The fields of the envelope that state who requested the call.
pub(super) struct StoredIdentity<'a> {
    pub(super) subject_to_rules: bool,
    pub(super) auth_method: Option<Cow<'a, str>>,
    pub(super) roles: Option<Cow<'a, str>>,
    pub(super) attributes: Option<Cow<'a, CallerAttributes>>,
}

fn implied(subject_to_rules: bool) -> (AuthMethod, RoleSet) {
    match subject_to_rules {
        true => (AuthMethod::Key, Role::Agent.into()),
        false => (AuthMethod::Local, Role::Admin.into()),
    }
}

pub(super) fn to_stored(origin: &Origin) -> StoredIdentity<'_> {
    let is_keyed = origin.auth_method == AuthMethod::Key;
    let subject_to_rules = is_keyed && !origin.roles.contains(Role::Admin);
    let (auth_method, roles) = implied(subject_to_rules);
    let attributes = origin.attributes.as_ref();
    StoredIdentity {
        subject_to_rules,
        auth_method: (origin.auth_method != auth_method)
            .then(|| Cow::Borrowed(origin.auth_method.as_str())),
        roles: (origin.roles != roles).then(|| Cow::Owned(origin.roles.to_string())),
        attributes: (*attributes != CallerAttributes::default())
            .then_some(Cow::Borrowed(attributes)),
    }
}

/// Returns an origin that has the identity of the requester only.
pub(super) fn restore(stored: StoredIdentity<'_>) -> Result<Origin, StoreError> {
    let (auth_method, roles) = implied(stored.subject_to_rules);
    let auth_method = match &stored.auth_method {
        None => auth_method,
        Some(text) => AuthMethod::parse(text)
            .ok_or_else(|| StoreError::Corrupt(format!("auth_method {text}")))?,
    };
    let roles = match &stored.roles {
        None => roles,
        Some(text) if text.is_empty() => RoleSet::default(),
        Some(text) => text.parse().map_err(|()| StoreError::Corrupt(format!("roles {text}")))?,
    };
    let attributes = stored.attributes.map(|attributes| Arc::new(attributes.into_owned()));
    let attributes = attributes.unwrap_or_default();
    Ok(Origin { auth_method, roles, attributes, ..Origin::default() })
}
