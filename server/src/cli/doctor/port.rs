//! Checks the port: free, used by Toolcrib, or taken by another process.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

use super::CheckResult;
use crate::cli::CommandContext;
use crate::cli::client::{ApiClient, ApiRequest};
use crate::config::Config;

const CHECK_NAME: &str = "port";
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// Checks the port. Returns true as well if a Toolcrib server responds on it.
pub async fn check(context: &CommandContext, config: &Config) -> (CheckResult, bool) {
    let unanswered = |finding| (finding, false);
    let listen = config.listen.as_str();
    let resolved = listen.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    let Some(address) = resolved else {
        let hint = "give an address of this machine, such as 127.0.0.1:8080";
        return unanswered(CheckResult::error(
            CHECK_NAME,
            format!("{listen} cannot be resolved"),
            hint,
        ));
    };
    if address.port() == 0 {
        return unanswered(CheckResult::ok(CHECK_NAME, format!("{listen}: any free port")));
    }
    unanswered(match TcpListener::bind(address) {
        Ok(_) => CheckResult::ok(CHECK_NAME, format!("{listen} is free")),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            return check_port_in_use(context, listen, address).await;
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => CheckResult::error(
            CHECK_NAME,
            format!("{listen}: {error}"),
            "ports below 1024 need more rights: choose a higher one with --listen",
        ),
        Err(error) => CheckResult::error(
            CHECK_NAME,
            format!("{listen}: {error}"),
            "give an address of this machine, such as 127.0.0.1:8080",
        ),
    })
}

async fn check_port_in_use(
    context: &CommandContext,
    listen: &str,
    address: SocketAddr,
) -> (CheckResult, bool) {
    let owner = listening_process(address.port());
    let by = owner.map_or_else(String::new, |(pid, name)| format!(" (pid {pid}, {name})"));
    if is_toolcrib(context, address).await {
        return (
            CheckResult::ok(CHECK_NAME, format!("a toolcrib is running on {listen}{by}")),
            true,
        );
    }
    let next = SocketAddr::new(address.ip(), address.port().checked_add(1).unwrap_or(8_080));
    let finding = CheckResult::error(
        CHECK_NAME,
        format!("{listen} is taken by another program{by}"),
        format!("stop it, or choose another port: toolcrib serve --listen {next}"),
    );
    (finding, false)
}

/// Returns true if the process that listens there is alive and responds like Toolcrib.
async fn is_toolcrib(context: &CommandContext, address: SocketAddr) -> bool {
    let mut address = address;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    let server = format!("http://{address}");
    let Ok(client) = ApiClient::new(&server, context.global.key.as_deref(), None) else {
        return false;
    };
    let answer = async {
        client.is_toolcrib_alive().await
            && match client.request_json(ApiRequest::get(&["v1", "tools"])).await {
                Ok(answer) => answer["tools"].is_array(),
                // A server that requires a key answers with an error code of Toolcrib's table.
                Err(failure) => toolcrib::Code::parse(&failure.code).is_some(),
            }
    };
    tokio::time::timeout(ANSWER_LIMIT, answer).await.unwrap_or(false)
}

/// Returns the process that listens on a port, as far as this user may see it.
fn listening_process(port: u16) -> Option<(u32, String)> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| std::fs::read_to_string(table).ok())
        .flat_map(|table| listening_inodes(&table, port))
        .collect();
    let sockets: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(files) = std::fs::read_dir(process.path().join("fd")) else { continue };
        let holds = files.flatten().any(|file| {
            let target = std::fs::read_link(file.path()).unwrap_or_default();
            sockets.iter().any(|socket| target.as_os_str() == socket.as_str())
        });
        if holds {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some((pid, name.trim().to_owned()));
        }
    }
    None
}

/// Returns the inodes of the sockets that listen on a port.
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    const LISTENING: &str = "0A";
    let suffix = format!(":{port:04X}");
    let inode = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let local = words.get(1)?;
        let listens = words.get(3) == Some(&LISTENING) && local.ends_with(&suffix);
        words.get(9).filter(|_| listens).map(|&inode| inode.to_owned())
    };
    table.lines().skip(1).filter_map(inode).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::CheckState;
    use super::*;

    #[test]
    fn the_process_that_listens_on_a_port_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (pid, name) = listening_process(listener.local_addr().unwrap().port()).unwrap();
        assert_eq!(pid, std::process::id());
        assert!(!name.is_empty());
    }

    #[test]
    fn malformed_socket_tables_are_tolerated() {
        let line = "head\n 0: 0100007F:1F90 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n";
        assert_eq!(listening_inodes(line, 8080), ["4242"]);
        assert_eq!(listening_inodes(line, 8081), [""; 0]);
        assert_eq!(listening_inodes("head\nx\n 0: :1F90\n", 8080), [""; 0]);
    }

    #[tokio::test]
    async fn free_and_occupied_ports_are_distinguished() {
        let context = crate::cli::tests::context(false);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let config = Config { listen: address.to_string(), ..Config::default() };
        // Accepts connections and responds like a program that is not Toolcrib.
        let other_program = std::thread::spawn(move || {
            for stream in listener.incoming().take(1) {
                use std::io::Write;
                let _ = stream.unwrap().write_all(b"HTTP/1.1 404 Not Found\r\n\r\n");
            }
        });
        let (finding, _) = check(&context, &config).await;
        assert_eq!(finding.state, CheckState::Error);
        assert!(finding.message.contains("another program"), "{}", finding.message);
        other_program.join().unwrap();
        let (finding, _) = check(&context, &config).await;
        assert_eq!(finding.state, CheckState::Ok, "{}", finding.message);
    }
}
