//! The availability of a tool: whether its executor can take a call now. Pure.
//!
//! A call of a tool whose executor is away is accepted and waits. The caller should know that: the
//! text names the reason, and the client that was connected last.

/// Availability of a tool at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolAvailability {
    /// The reason why no executor can take a call now; `None` if one can, as far as is known.
    pub problem: Option<String>,
    /// The clients that offer the tool, connected or not. Empty for tools of other executors.
    pub clients: Vec<ToolClient>,
}

/// A client that offers a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolClient {
    /// Id of the client.
    pub client_id: String,
    /// True if the client is connected, or polls and did so recently.
    pub is_connected: bool,
    /// Time when the client was last connected, in Unix milliseconds; `None` if it has not been
    /// seen since the start of the server.
    pub last_seen_ms: Option<u64>,
}

impl ToolAvailability {
    /// Returns true if an executor can take a call now, as far as is known.
    pub fn is_available(&self) -> bool {
        self.problem.is_none()
    }

    /// Builds the availability of a client tool from the clients that offer it.
    pub(crate) fn of_clients(tool: &str, clients: Vec<ToolClient>, now_ms: u64) -> Self {
        let problem = (!clients.iter().any(|client| client.is_connected)).then(|| {
            let last = clients.iter().max_by_key(|client| client.last_seen_ms);
            match last {
                None => format!("no client offers {tool}"),
                Some(client) => format!(
                    "no client that offers {tool} is connected; {}",
                    last_seen_text(client, now_ms)
                ),
            }
        });
        Self { problem, clients }
    }
}

/// Says when a client was there: `client_demo was last seen 3 min ago`.
pub(crate) fn last_seen_text(client: &ToolClient, now_ms: u64) -> String {
    let id = &client.client_id;
    match client.last_seen_ms {
        None => format!("{id} has not connected since the server started"),
        Some(seen_ms) => {
            let age = match now_ms.saturating_sub(seen_ms) / 1_000 {
                seconds @ 0..120 => format!("{seconds} s"),
                seconds @ 120..7_200 => format!("{} min", seconds / 60),
                seconds => format!("{} h", seconds / 3_600),
            };
            format!("{id} was last seen {age} ago")
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn client(client_id: &str, is_connected: bool, last_seen_ms: Option<u64>) -> ToolClient {
        ToolClient { client_id: client_id.to_owned(), is_connected, last_seen_ms }
    }

    #[test]
    fn the_problem_names_the_client_that_was_there_last() {
        let problem = |clients| ToolAvailability::of_clients("a.b", clients, 400_000).problem;
        assert_eq!(problem(vec![client("x", false, None), client("y", true, Some(1))]), None);
        assert_eq!(problem(vec![]).unwrap(), "no client offers a.b");
        assert_eq!(
            problem(vec![client("x", false, Some(200_000)), client("y", false, None)]).unwrap(),
            "no client that offers a.b is connected; x was last seen 3 min ago"
        );
        assert_eq!(
            problem(vec![client("y", false, None)]).unwrap(),
            "no client that offers a.b is connected; y has not connected since the server started"
        );
    }
}
