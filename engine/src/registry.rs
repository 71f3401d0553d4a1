//! The directory of a project: tools, clients, keys, access rules, agents and upstreams; search over
//! the tools; and the decision whether a caller may use one.

pub mod authorize;
pub mod catalog;
pub mod keys;
pub mod model_tool_names;
pub mod model_tools;
pub mod projects;
pub mod search;
pub mod upstreams;
