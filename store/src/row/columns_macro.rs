//! Lists the columns of a query once, for its SQL and for the code that reads its rows.

/// Defines the column list of a `SELECT` as a string constant, and an enum whose variants are the
/// positions of these columns.
macro_rules! columns {
    (
        $(#[$about:meta])*
        $list:ident, $column:ident {
            $first:ident = $first_sql:literal $(, $next:ident = $next_sql:literal)* $(,)?
        }
    ) => {
        $(#[$about])*
        pub(crate) const $list: &str = concat!($first_sql $(, ", ", $next_sql)*);

        #[doc = concat!("The position of each column of [`", stringify!($list), "`].")]
        #[derive(Clone, Copy)]
        pub(crate) enum $column {
            $first $(, $next)*
        }

        impl $column {
            /// The number of columns, which is the position of a column selected after them.
            #[allow(dead_code)]
            pub(crate) const COUNT: usize = [$first_sql $(, $next_sql)*].len();
        }
    };
}

pub(crate) use columns;
