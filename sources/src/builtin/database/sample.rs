//! The sample database: a small shop to try `database.query` on before a real one is configured.
//!
//! It is created once, when its file is missing, under a temporary name first, so that an
//! incomplete one is never used. Its rows are the same everywhere: examples and tests can rely on
//! them.

use std::fs;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, params};

/// The tables, for the tool's description.
pub const TABLES: &str = "customers(id, name, email, city, country, joined_on), \
products(id, name, category, price, stock), \
orders(id, customer_id, ordered_on, status), \
order_items(order_id, product_id, quantity, unit_price)";

const SCHEMA: &str = "
CREATE TABLE customers (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL UNIQUE,
  city TEXT NOT NULL, country TEXT NOT NULL, joined_on TEXT NOT NULL
);
CREATE TABLE products (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, category TEXT NOT NULL,
  price REAL NOT NULL, stock INTEGER NOT NULL
);
CREATE TABLE orders (
  id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers(id),
  ordered_on TEXT NOT NULL, status TEXT NOT NULL
);
CREATE TABLE order_items (
  order_id INTEGER NOT NULL REFERENCES orders(id),
  product_id INTEGER NOT NULL REFERENCES products(id),
  quantity INTEGER NOT NULL, unit_price REAL NOT NULL,
  PRIMARY KEY (order_id, product_id)
);
";

const CUSTOMERS: [(&str, &str, &str, &str); 12] = [
    ("Ada Lindqvist", "Stockholm", "Sweden", "2024-01-14"),
    ("Bruno Costa", "Lisbon", "Portugal", "2024-02-03"),
    ("Chen Wei", "Beijing", "China", "2024-02-21"),
    ("Dalia Haddad", "Beirut", "Lebanon", "2024-03-09"),
    ("Emeka Obi", "Lagos", "Nigeria", "2024-04-17"),
    ("Freya Nielsen", "Copenhagen", "Denmark", "2024-05-02"),
    ("Gustavo Rojas", "Lima", "Peru", "2024-06-25"),
    ("Hana Sato", "Osaka", "Japan", "2024-07-11"),
    ("Ines Moreau", "Lyon", "France", "2024-08-30"),
    ("Jonas Weber", "Hamburg", "Germany", "2024-09-18"),
    ("Kavya Rao", "Bengaluru", "India", "2024-10-05"),
    ("Liam Murphy", "Cork", "Ireland", "2024-11-22"),
];

const PRODUCTS: [(&str, &str, f64, i64); 12] = [
    ("Claw hammer", "hand tools", 18.50, 120),
    ("Screwdriver set", "hand tools", 24.90, 85),
    ("Adjustable wrench", "hand tools", 16.20, 64),
    ("Hand saw", "hand tools", 21.00, 40),
    ("Cordless drill", "power tools", 119.00, 32),
    ("Jigsaw", "power tools", 84.50, 18),
    ("Orbital sander", "power tools", 69.90, 25),
    ("Tape measure", "measuring", 9.80, 210),
    ("Spirit level", "measuring", 27.40, 55),
    ("Laser distance meter", "measuring", 59.00, 0),
    ("Safety goggles", "protection", 12.30, 150),
    ("Work gloves", "protection", 7.60, 300),
];

const STATUSES: [&str; 5] = ["delivered", "delivered", "shipped", "delivered", "canceled"];
const ORDERS: usize = 30;

/// Returns the path of the sample database, after creating it if it is missing.
pub fn ensure_sample_database(data_dir: &Path) -> Result<PathBuf, String> {
    let path = data_dir.join("sample.db");
    if path.exists() {
        return Ok(path);
    }
    let failed = |error: String| format!("cannot make the sample database {path:?}: {error}");
    fs::create_dir_all(data_dir).map_err(|error| failed(error.to_string()))?;
    let unfinished = data_dir.join(format!("sample.db.{}.new", std::process::id()));
    // A process with the same id may have been killed here and left the file behind.
    let _ = fs::remove_file(&unfinished);
    write_sample_rows(&unfinished).map_err(|error| failed(error.to_string()))?;
    fs::rename(&unfinished, &path).map_err(|error| failed(error.to_string()))?;
    Ok(path)
}

fn write_sample_rows(path: &Path) -> rusqlite::Result<()> {
    let mut connection = Connection::open(path)?;
    connection.execute_batch(SCHEMA)?;
    let transaction = connection.transaction()?;
    for (id, (name, city, country, joined_on)) in (1_u32..).zip(CUSTOMERS) {
        let email = format!("{}@example.com", name.to_lowercase().replace(' ', "."));
        transaction.execute(
            "INSERT INTO customers VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![id, name, email, city, country, joined_on],
        )?;
    }
    for (id, (name, category, price, stock)) in (1_u32..).zip(PRODUCTS) {
        transaction.execute(
            "INSERT INTO products VALUES (?1, ?2, ?3, ?4, ?5)",
            params![id, name, category, price, stock],
        )?;
    }
    for (id, n) in (1_u32..).zip(0..ORDERS) {
        // Steps without a common factor with the counts make the rows look mixed.
        let ordered_on = format!("2025-{:02}-{:02}", n * 5 % 12 + 1, n * 11 % 28 + 1);
        let customer = (n * 7 % CUSTOMERS.len() + 1) as u32;
        transaction.execute(
            "INSERT INTO orders VALUES (?1, ?2, ?3, ?4)",
            params![id, customer, ordered_on, STATUSES[n % STATUSES.len()]],
        )?;
        for item in 0..=n % 3 {
            let product = (n * 5 + item * 7) % PRODUCTS.len();
            transaction.execute(
                "INSERT INTO order_items VALUES (?1, ?2, ?3, ?4)",
                params![id, product as u32 + 1, ((n + item) % 4 + 1) as u32, PRODUCTS[product].2],
            )?;
        }
    }
    transaction.commit()?;
    connection.close().map_err(|(_, error)| error)
}
