//! A map by project and name. Lookups need no allocated key.

use std::collections::HashMap;

/// Values by project and name.
pub(super) struct ProjectMap<T>(NameMap<NameMap<T>>);

/// Values by name.
pub(crate) type NameMap<T> = HashMap<String, T, foldhash::fast::RandomState>;

impl<T> Default for ProjectMap<T> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<T> ProjectMap<T> {
    pub(super) fn get(&self, project: &str, name: &str) -> Option<&T> {
        self.0.get(project)?.get(name)
    }

    /// Returns the values of one project.
    pub(super) fn values_in(&self, project: &str) -> impl Iterator<Item = &T> {
        self.0.get(project).into_iter().flat_map(HashMap::values)
    }

    /// Returns the number of values of one project.
    pub(super) fn count(&self, project: &str) -> usize {
        self.0.get(project).map_or(0, HashMap::len)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.0.values().flat_map(HashMap::values)
    }

    pub(super) fn insert(&mut self, project: &str, name: &str, thing: T) {
        self.0.entry(project.to_owned()).or_default().insert(name.to_owned(), thing);
    }
}

impl<T: Default> ProjectMap<T> {
    /// Returns the value of this project and name, inserting the default if there is none.
    pub(super) fn entry_or_default(&mut self, project: &str, name: &str) -> &mut T {
        self.0.entry(project.to_owned()).or_default().entry(name.to_owned()).or_default()
    }
}
