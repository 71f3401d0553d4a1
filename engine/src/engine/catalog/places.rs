//! What is kept by project and name, looked up without making a text of the two.

use std::collections::HashMap;

/// Things by project and name.
pub(super) struct Places<T>(ByName<ByName<T>>);

/// Things by name.
pub(in crate::engine) type ByName<T> = HashMap<String, T, foldhash::fast::RandomState>;

impl<T> Default for Places<T> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<T> Places<T> {
    pub(super) fn get(&self, project: &str, name: &str) -> Option<&T> {
        self.0.get(project)?.get(name)
    }

    /// All of a project.
    pub(super) fn of(&self, project: &str) -> impl Iterator<Item = &T> {
        self.0.get(project).into_iter().flat_map(HashMap::values)
    }

    /// How many a project has.
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

impl<T: Default> Places<T> {
    /// What is there, or the first of its kind.
    pub(super) fn at(&mut self, project: &str, name: &str) -> &mut T {
        self.0.entry(project.to_owned()).or_default().entry(name.to_owned()).or_default()
    }
}
