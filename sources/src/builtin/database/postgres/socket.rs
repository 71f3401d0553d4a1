//! Sockets to a PostgreSQL server that limit the number of bytes received.
//!
//! The driver reads a whole row into memory before it can be examined, and a row can be a gigabyte.
//! The bytes are therefore counted here, below the driver, and at the limit the socket fails.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_postgres::Config;
use tokio_postgres::config::Host;

/// Address of a server.
#[derive(Debug, Clone, PartialEq)]
pub enum PostgresAddress {
    Name(String, u16),
    Ip(IpAddr, u16),
    Unix(PathBuf),
}

/// Both directions of a connection.
pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Socket for T {}

/// Returns all addresses of a configuration, in order.
pub fn addresses(config: &Config) -> Vec<PostgresAddress> {
    let ports = config.get_ports();
    let port = |n: usize| ports.get(n).or(ports.first()).copied().unwrap_or(5432);
    let ips = config.get_hostaddrs();
    if !ips.is_empty() {
        return ips.iter().enumerate().map(|(n, ip)| PostgresAddress::Ip(*ip, port(n))).collect();
    }
    let address = |(n, host): (usize, &Host)| match host {
        Host::Tcp(name) => PostgresAddress::Name(name.clone(), port(n)),
        #[cfg(unix)]
        Host::Unix(folder) => PostgresAddress::Unix(folder.join(format!(".s.PGSQL.{}", port(n)))),
    };
    config.get_hosts().iter().enumerate().map(address).collect()
}

/// Connects to the first address that accepts the connection.
pub async fn connect_first(
    addresses: &[PostgresAddress],
) -> io::Result<(Box<dyn Socket>, PostgresAddress)> {
    let mut failed = io::Error::other("no address");
    for address in addresses {
        match address.connect().await {
            Ok(socket) => return Ok((socket, address.clone())),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

impl PostgresAddress {
    /// Connects to this address.
    pub async fn connect(&self) -> io::Result<Box<dyn Socket>> {
        let stream = match self {
            Self::Name(name, port) => TcpStream::connect((name.as_str(), *port)).await?,
            Self::Ip(ip, port) => TcpStream::connect((*ip, *port)).await?,
            #[cfg(unix)]
            Self::Unix(path) => return Ok(Box::new(tokio::net::UnixStream::connect(path).await?)),
            #[cfg(not(unix))]
            Self::Unix(_) => return Err(io::Error::other("no Unix sockets here")),
        };
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }
}

/// A socket that delivers a limited number of bytes.
pub struct ByteLimitedSocket {
    socket: Box<dyn Socket>,
    bytes_left: usize,
    limit_hit: Arc<AtomicBool>,
}

impl ByteLimitedSocket {
    /// Creates a socket that delivers at most `byte_limit` bytes, then sets `limit_hit` and fails.
    pub fn new(socket: Box<dyn Socket>, byte_limit: usize, limit_hit: Arc<AtomicBool>) -> Self {
        Self { socket, bytes_left: byte_limit, limit_hit }
    }
}

impl AsyncRead for ByteLimitedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.bytes_left == 0 {
            self.limit_hit.store(true, Ordering::Relaxed);
            return Poll::Ready(Err(io::Error::other("the result is too large")));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(context, buffer);
        self.bytes_left = self.bytes_left.saturating_sub(buffer.filled().len() - before);
        read
    }
}

impl AsyncWrite for ByteLimitedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
