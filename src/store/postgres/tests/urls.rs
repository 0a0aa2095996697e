//! Urls as they are written for other libraries: each option is honoured, or refused with what to write instead.

use tokio_postgres::config::ChannelBinding;

use super::super::address::Endpoint;
use super::super::options::Wanted;
use super::super::secure::{Plain, Security};
use super::super::store::PostgresStore;
use crate::store::LockStore;
use crate::store::tls::{Tls, Verify};

/// What is made of a url, or why nothing is.
fn read(url: &str) -> Result<String, String> {
    let parsed = Endpoint::parse(url).map_err(|fault| fault.to_string());
    let (mut endpoint, said) = parsed?;
    let warns = endpoint.secure();
    let warns = warns.map_err(|fault| fault.to_string())?;
    let mut told = vec![endpoint.address.to_string()];
    let login = &endpoint.login;
    let mut tell = |what: &str, value: Option<String>| {
        told.extend(value.map(|value| format!("{what}{value}")));
    };
    tell("user ", login.get_user().map(str::to_owned));
    let password = login.get_password().map(|it| String::from_utf8_lossy(it));
    tell("password ", password.map(|it| it.into_owned()));
    tell("db ", login.get_dbname().map(str::to_owned));
    tell("name ", login.get_application_name().map(str::to_owned));
    tell("options ", login.get_options().map(str::to_owned));
    let binding = login.get_channel_binding();
    tell(
        "binding ",
        (binding != ChannelBinding::Prefer).then(|| format!("{binding:?}")),
    );
    tell(
        "",
        Some(match &endpoint.security {
            Security {
                plain: Plain::Everywhere,
                ..
            } => "plain".to_owned(),
            Security {
                plain,
                is_direct,
                tls,
            } => {
                let how = match tls.verify() {
                    Verify::Full => "verified",
                    Verify::Chain => "chain",
                    Verify::Nothing => "unverified",
                };
                let is_optional = match plain {
                    Plain::Nowhere => "",
                    _ => " if there is",
                };
                let is_direct = if *is_direct { " direct" } else { "" };
                format!(
                    "{how}{is_optional}{is_direct}{}",
                    if warns { " warns" } else { "" }
                )
            }
        }),
    );
    let within = endpoint.connect_within.as_secs_f64();
    tell("within ", (within != 5.0).then(|| within.to_string()));
    tell(
        "wanted ",
        endpoint.wanted.map(|it: Wanted| format!("{it:?}")),
    );
    tell("shuffled", endpoint.shuffles().then(String::new));
    tell(
        "probing ",
        (!login.get_keepalives()).then(|| "off".to_owned()),
    );
    let idle = login.get_keepalives_idle().as_secs();
    tell("idle ", (idle != 5).then(|| idle.to_string()));
    tell(
        "interval ",
        login
            .get_keepalives_interval()
            .filter(|it| it.as_secs() != 5)
            .map(|it| it.as_secs().to_string()),
    );
    tell(
        "count ",
        login
            .get_keepalives_retries()
            .filter(|it| *it != 2)
            .map(|it| it.to_string()),
    );
    tell(
        "unconfirmed ",
        login
            .get_tcp_user_timeout()
            .filter(|it| it.as_secs() != 11)
            .map(|it| it.as_millis().to_string()),
    );
    tell("schema ", said.schema);
    tell("owner ", said.schema_owner);
    tell("pooled ", said.pooled);
    tell("pooler", said.is_pooler.then(String::new));
    tell("prefix ", said.registry.prefix);
    tell("instance ", said.registry.name);
    tell(
        "answers ",
        said.registry
            .response_timeout
            .map(|it| it.as_secs_f64().to_string()),
    );
    Ok(told.join(", "))
}

/// A url, and what is made of it, or words of the error behind a `!`.
const URLS: &[(&str, &str)] = &[
    // libpq
    ("postgresql://", "! no host"),
    ("postgresql://localhost", "localhost:5432, verified"),
    ("postgresql://localhost:5433", "localhost:5433, verified"),
    (
        "postgresql://localhost/mydb",
        "localhost:5432, db mydb, verified",
    ),
    (
        "postgresql://user:secret@localhost",
        "localhost:5432, user user, password secret, verified",
    ),
    (
        "postgresql://other@localhost/otherdb?connect_timeout=10&application_name=myapp",
        "localhost:5432, user other, db otherdb, name myapp, verified, within 10",
    ),
    (
        "postgresql://host1:123,host2:456/somedb?target_session_attrs=any&application_name=myapp",
        "host1:123,host2:456, db somedb, name myapp, verified",
    ),
    (
        "postgresql:///mydb?host=localhost&port=5433",
        "localhost:5433, db mydb, verified",
    ),
    (
        "postgresql://[2001:db8::1234]/database",
        "[2001:db8::1234]:5432, db database, verified",
    ),
    (
        "postgresql:///dbname?host=/var/lib/postgresql",
        "/var/lib/postgresql:5432, db dbname, plain",
    ),
    (
        "postgresql://%2Fvar%2Flib%2Fpostgresql/dbname",
        "/var/lib/postgresql:5432, db dbname, plain",
    ),
    (
        "postgresql://user@localhost:5433/mydb?options=-c%20synchronous_commit%3Doff",
        "localhost:5433, user user, db mydb, options -c synchronous_commit=off, verified",
    ),
    ("postgres://h?sslmode=disable", "h:5432, plain"),
    (
        "postgres://h?sslmode=allow",
        "h:5432, unverified if there is warns",
    ),
    (
        "postgres://h?sslmode=prefer",
        "h:5432, unverified if there is warns",
    ),
    (
        "postgres://localhost?sslmode=prefer",
        "localhost:5432, unverified if there is",
    ),
    ("postgres://h?sslmode=require", "h:5432, unverified warns"),
    (
        "postgres://h?sslmode=require&sslrootcert={ca}",
        "h:5432, chain",
    ),
    (
        "postgres://h?sslmode=prefer&sslrootcert={ca}",
        "h:5432, chain",
    ),
    (
        "postgres://h?sslmode=verify-ca&sslrootcert={ca}",
        "h:5432, chain",
    ),
    ("postgres://h?sslmode=verify-ca", "! needs ca_file"),
    ("postgres://h?sslmode=verify-full", "h:5432, verified"),
    (
        "postgres://h?sslmode=verify-full&sslrootcert={ca}",
        "h:5432, verified",
    ),
    ("postgres://h?sslrootcert=system", "h:5432, verified"),
    (
        "postgres://h?sslmode=require&sslrootcert=system",
        "! needs sslmode=verify-full",
    ),
    (
        "postgres://h?sslmode=disable&sslrootcert={ca}",
        "! contradicts",
    ),
    ("postgres://h?sslmode=VERIFY-FULL", "! sslmode must be"),
    (
        "postgres://h?sslmode=require&sslnegotiation=direct",
        "h:5432, unverified direct warns",
    ),
    (
        "postgres://h?sslmode=prefer&sslnegotiation=direct",
        "! needs sslmode=require",
    ),
    ("postgres://h?sslcert={ca}", "! need each other"),
    (
        "postgres://h?hostaddr=10.0.0.1&sslmode=verify-full",
        "h:5432, verified",
    ),
    (
        "postgres://a,b?target_session_attrs=primary&load_balance_hosts=random",
        "a:5432,b:5432, verified, wanted Primary, shuffled",
    ),
    (
        "postgres://a,b?target_session_attrs=read-write",
        "a:5432,b:5432, verified, wanted Writable",
    ),
    (
        "postgres://a?target_session_attrs=read-only",
        "! a lock is written",
    ),
    (
        "postgres://a?target_session_attrs=standby",
        "! a lock is written",
    ),
    (
        "postgres://a?target_session_attrs=prefer-standby",
        "! a lock is written",
    ),
    (
        "postgres://h?keepalives=1&keepalives_idle=30&keepalives_interval=10&keepalives_count=3&tcp_user_timeout=20000",
        "h:5432, verified, idle 30, interval 10, count 3, unconfirmed 20000",
    ),
    ("postgres://h?keepalives=0", "h:5432, verified, probing off"),
    (
        "postgres://h?client_encoding=utf8&gssencmode=disable&sslsni=1&sslcompression=0&ssl_min_protocol_version=TLSv1.2",
        "h:5432, verified",
    ),
    ("postgres://h?client_encoding=latin1", "! speaks UTF8"),
    ("postgres://h?gssencmode=prefer", "! Kerberos"),
    ("postgres://h?krbsrvname=postgres", "! Kerberos"),
    ("postgres://h?sslsni=0", "! sslsni"),
    (
        "postgres://h?ssl_min_protocol_version=TLSv1.3",
        "! TLS 1.2 and 1.3",
    ),
    (
        "postgres://h?fallback_application_name=psql",
        "h:5432, name psql, verified",
    ),
    (
        "postgres://h?require_auth=scram-sha-256",
        "! channel_binding=require",
    ),
    ("postgres://h?passfile=/x", "! credentials"),
    ("postgresql://?service=myservice", "! credentials"),
    ("postgres://h?sslpassword=w0rd", "! without a passphrase"),
    ("postgres://h?sslcrl=/x", "! revocation"),
    ("postgres://h?sslcertmode=allow", "! leave it out"),
    (
        "postgres://h?user=app&password=w%26rd&dbname=shop&port=6432",
        "h:6432, user app, password w&rd, db shop, verified",
    ),
    (
        "host=localhost dbname=mydb connect_timeout=10",
        "! must begin with postgres://",
    ),
    // Neon, Supabase, Heroku, DigitalOcean, RDS, Cloud SQL, Azure
    (
        "postgresql://alex:AbC123dEf@ep-cool-darkness-123456-pooler.us-east-2.aws.neon.tech/dbname?sslmode=require&channel_binding=require",
        "ep-cool-darkness-123456-pooler.us-east-2.aws.neon.tech:5432, user alex, password AbC123dEf, db dbname, binding Require, unverified warns",
    ),
    (
        "postgres://alex:pw@ep-cool-darkness-123456.us-east-2.aws.neon.tech/dbname?options=endpoint%3Dep-cool-darkness-123456&sslmode=verify-full",
        "ep-cool-darkness-123456.us-east-2.aws.neon.tech:5432, user alex, password pw, db dbname, options endpoint=ep-cool-darkness-123456, verified",
    ),
    (
        "postgres://postgres.abcdefgh:pw@aws-0-eu-central-1.pooler.supabase.com:6543/postgres?pgbouncer=true",
        "aws-0-eu-central-1.pooler.supabase.com:6543, user postgres.abcdefgh, password pw, db postgres, verified, pooler",
    ),
    (
        "postgres://postgres.abcdefgh:pw@aws-0-eu-central-1.pooler.supabase.com:6543/postgres?pgbouncer=true&connection_limit=1",
        "! leave it out",
    ),
    (
        "postgres://foo:pw@ec2-1-2-3-4.compute-1.amazonaws.com:5432/d1",
        "ec2-1-2-3-4.compute-1.amazonaws.com:5432, user foo, password pw, db d1, verified",
    ),
    (
        "postgres://foo:pw@ec2-1-2-3-4.compute-1.amazonaws.com:5432/d1?sslmode=no-verify",
        "! sslmode=require",
    ),
    (
        "postgresql://doadmin:pw@db-1.b.db.ondigitalocean.com:25060/defaultdb?sslmode=require",
        "db-1.b.db.ondigitalocean.com:25060, user doadmin, password pw, db defaultdb, unverified warns",
    ),
    (
        "postgresql://app@db.cluster-x.eu-west-1.rds.amazonaws.com/shop?sslmode=verify-full&sslrootcert={ca}",
        "db.cluster-x.eu-west-1.rds.amazonaws.com:5432, user app, db shop, verified",
    ),
    (
        "postgresql://app:pw@/shop?host=/cloudsql/project:europe-west1:db",
        "/cloudsql/project:europe-west1:db:5432, user app, password pw, db shop, plain",
    ),
    (
        "postgres://app%40server:pw@server.postgres.database.azure.com/shop?sslmode=require",
        "server.postgres.database.azure.com:5432, user app@server, password pw, db shop, unverified warns",
    ),
    // Prisma
    (
        "postgresql://janedoe:mypassword@localhost:5432/mydb?schema=sample",
        "! lock_schema",
    ),
    (
        "postgresql://janedoe:pw@localhost:5432/mydb?lock_schema=sample",
        "localhost:5432, user janedoe, password pw, db mydb, verified, schema sample",
    ),
    (
        "postgresql://USER:PASSWORD@localhost/database?host=/var/run/postgresql/",
        "/var/run/postgresql/:5432, user USER, password PASSWORD, db database, plain",
    ),
    (
        "postgresql://root:pw@127.0.0.1:54321/postgres?pgbouncer=true",
        "127.0.0.1:54321, user root, password pw, db postgres, verified, pooler",
    ),
    ("postgresql://h/db?connection_limit=5", "! lanes"),
    ("postgresql://h/db?pool_timeout=2", "! leave it out"),
    ("postgresql://h/db?socket_timeout=3", "! response_timeout"),
    (
        "postgresql://h/db?sslmode=require&sslaccept=strict",
        "! leave it out for strict",
    ),
    (
        "postgresql://h/db?sslidentity=client-identity.p12&sslpassword=pw",
        "! cert_file and key_file",
    ),
    (
        "postgresql://h/db?statement_cache_size=0",
        "! pgbouncer=true",
    ),
    // sqlx, tokio-postgres, pgx, asyncpg, SQLAlchemy
    (
        "postgres://h/db?statement-cache-capacity=0",
        "! pgbouncer=true",
    ),
    (
        "postgresql://h/db?ssl-mode=verify-full&ssl-ca={ca}",
        "h:5432, db db, verified",
    ),
    ("postgresql://h?ssl-root-cert={ca}", "h:5432, verified"),
    (
        "postgres://h?keepalives_retries=4",
        "h:5432, verified, count 4",
    ),
    (
        "postgres://jack:secret@pg.example.com:5432/mydb?sslmode=verify-ca&pool_max_conns=10&pool_max_conn_lifetime=1h30m",
        "! lanes",
    ),
    (
        "postgres://h/db?default_query_exec_mode=simple_protocol",
        "! pgbouncer=true",
    ),
    ("postgres://h/db?binary_parameters=yes", "! pgbouncer=true"),
    ("postgres://h/db?search_path=app", "! lock_schema"),
    (
        "postgresql+asyncpg://scott:tiger@localhost/test",
        "! leave out what follows the +",
    ),
    (
        "postgresql+psycopg2://scott:tiger@localhost:5432/mydatabase",
        "! must begin with postgres://",
    ),
    (
        "postgresql://h/db?prepared_statement_cache_size=0",
        "! pgbouncer=true",
    ),
    // Rails, Django
    (
        "postgresql://foo:bar@localhost:9000/foo_test?pool=5&timeout=3000",
        "! lanes",
    ),
    (
        "postgresql://localhost/foo?encoding=unicode",
        "localhost:5432, db foo, verified",
    ),
    (
        "postgresql://localhost/foo?prepared_statements=false",
        "! pgbouncer=true",
    ),
    (
        "postgresql://localhost/foo?timeout=5000",
        "! connect_timeout",
    ),
    ("postgresql://localhost/foo?reconnect=true", "! made again"),
    (
        "postgresql://localhost/foo?schema_search_path=app",
        "! lock_schema",
    ),
    (
        "postgis://USER:PASSWORD@HOST:PORT/NAME",
        "! must begin with postgres://",
    ),
    ("postgres://h/db?conn_max_age=600", "! leave it out"),
    ("postgres://h/db?ssl_require=true", "! sslmode"),
    (
        "postgres://h/db?disable_server_side_cursors=true",
        "! leave it out",
    ),
    // node-postgres
    (
        "postgres://user:password@localhost:5432/mydb?ssl=true",
        "! sslmode=verify-full",
    ),
    (
        "postgres://h/db?sslmode=require&uselibpqcompat=true",
        "! what libpq says",
    ),
    // JDBC
    (
        "jdbc:postgresql://localhost/test?user=fred&password=secret&ssl=true",
        "! leave out jdbc:",
    ),
    (
        "postgresql://localhost/test?user=fred&password=secret&ssl=true",
        "! sslmode",
    ),
    ("postgresql://h/db?currentSchema=app", "! lock_schema"),
    (
        "postgresql://h/db?ApplicationName=app",
        "! application_name",
    ),
    ("postgresql://h/db?prepareThreshold=0", "! pgbouncer=true"),
    ("postgresql://h/db?loginTimeout=10", "! connect_timeout"),
    ("postgresql://h/db?socketTimeout=10", "! response_timeout"),
    (
        "postgresql://node1,node2/accounting?targetServerType=primary",
        "! target_session_attrs=primary",
    ),
    (
        "postgresql://h/db?sslfactory=org.postgresql.ssl.NonValidatingFactory",
        "! sslmode",
    ),
    // ours
    (
        "postgres://h?prefix=shop&name=web-1&response_timeout=500ms&connect_timeout=250ms&schema_owner=migrator",
        "h:5432, verified, within 0.25, owner migrator, prefix shop, instance web-1, answers 0.5",
    ),
    (
        "postgres://h?danger_accept_invalid_certificates=true",
        "h:5432, unverified warns",
    ),
    (
        "postgres://h?sslmode=verify-full&danger_accept_invalid_certificates=true",
        "! contradicts",
    ),
    (
        "postgres://h?server_name=db.internal&ca_file={ca}",
        "h:5432, verified",
    ),
    (
        "postgres://h?pooled=postgres%3A%2F%2Fp%3A6432%2Fdb%3Fsslmode%3Ddisable",
        "h:5432, verified, pooled postgres://p:6432/db?sslmode=disable",
    ),
    (
        "postgres://h?connect_timeout=0",
        "! connect_timeout must be",
    ),
    ("postgres://h?tcp_user_timeout=5s", "! milliseconds"),
    (
        "postgres://h?sslmode=require&ssl-mode=require",
        "! mean the same",
    ),
    ("postgres://h?frobnicate=1", "! unknown option frobnicate"),
    ("postgres://h:x/db", "! the port must be a number"),
    ("postgres://h:99999/db", "! the port must be a number"),
    ("postgres://h?port=x", "! the port must be a number"),
    // The rest of the password would be the host, which is shown.
    ("postgres://u:a@w0rd@h/db", "! %40"),
    ("postgres://u:a@x,w0rd@h/db", "! %40"),
];

#[test]
fn each_option_is_honoured_or_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.pem");
    let made = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap();
    std::fs::write(&ca, made.cert.pem()).unwrap();
    let mut wrong = Vec::new();
    for (url, expected) in URLS {
        let url = url.replace("{ca}", ca.to_str().unwrap());
        let read = read(&url);
        let is_right = match (&read, expected.strip_prefix("! ")) {
            (Err(error), Some(words)) => error.contains(words),
            (Ok(read), None) => read == expected,
            _ => false,
        };
        if !is_right {
            wrong.push(format!("{url}\n  is {read:?},\n  not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let count = |of: &[&str]| {
        URLS.iter()
            .filter(|(url, _)| of.iter().any(|it| url.contains(it)))
            .count()
    };
    assert!(URLS.len() > 35 && count(&["postgres"]) > 35);
}

/// What the refusal of a url says of a password is nothing.
#[test]
fn no_error_shows_a_value() {
    for (url, _) in URLS
        .iter()
        .filter(|(_, expected)| expected.starts_with('!'))
    {
        let error = Endpoint::parse(url).map(drop);
        let Err(error) = error else { continue };
        for secret in [
            "w0rd",
            "tiger",
            "secret",
            "PASSWORD",
            ":pw@",
            "client-identity",
        ] {
            assert!(!error.to_string().contains(secret), "{url}: {error}");
        }
    }
}

#[test]
fn the_url_of_a_pooler_says_nothing_of_the_store() {
    let builder = |of_pooler: &str| PostgresStore::builder("postgres://h").pooled(of_pooler);
    builder("postgres://p?pgbouncer=true")
        .connect_lazy()
        .unwrap();
    for option in [
        "prefix=a",
        "name=a",
        "response_timeout=1",
        "lock_schema=a",
        "schema_owner=a",
        "pooled=postgres%3A%2F%2Fq",
    ] {
        let url = format!("postgres://p?{option}");
        let error = builder(&url).connect_lazy().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("belong into the url of the store"),
            "{error}"
        );
    }
    let error =
        PostgresStore::connect_lazy("postgres://h?pgbouncer=true&pooled=postgres%3A%2F%2Fp")
            .unwrap_err();
    assert!(error.to_string().contains("pgbouncer=true"), "{error}");
    let store = PostgresStore::connect_lazy("postgres://h?prefix=shop&name=web").unwrap();
    let said = store.registry_options();
    assert_eq!(
        (said.prefix.as_deref(), said.name.as_deref()),
        (Some("shop"), Some("web"))
    );
}

/// Both say something: the builder adds to the url.
#[test]
fn certificates_of_url_and_builder_are_one() {
    let pem = |name: &str| {
        rcgen::generate_simple_self_signed([name.to_owned()])
            .unwrap()
            .cert
            .pem()
    };
    let root = pem("ca");
    let builder = |url: &str| PostgresStore::builder(url).root_certificate(&root);
    builder("postgres://h?server_name=db.internal")
        .connect_lazy()
        .unwrap();
    builder("postgres://h?sslmode=verify-ca")
        .server_name("db.internal")
        .connect_lazy()
        .unwrap();
    let dangerous = |url: &str| {
        builder(url)
            .danger_accept_invalid_certificates(true)
            .connect_lazy()
    };
    dangerous("postgres://h").unwrap();
    for url in [
        "postgres://h?sslmode=verify-full",
        "postgres://h?sslmode=disable",
    ] {
        dangerous(url).unwrap_err();
    }
}

/// What the builder says of TLS, beside what the url or a `Config` says.
#[test]
fn certificates_of_the_builder_need_tls() {
    let made = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap();
    let root = Tls::default().trusting(made.cert.pem().as_bytes()).unwrap();
    let secured = |mut endpoint: Endpoint| {
        endpoint.set_tls(root.clone());
        endpoint.secure().map_err(|fault| fault.to_string())?;
        let Security { plain, tls, .. } = endpoint.security;
        Ok::<_, String>((plain, tls.verify()))
    };
    for (url, expected) in [
        ("postgres://h", Verify::Full),
        ("postgres://h?sslmode=prefer", Verify::Chain),
        ("postgres://h?sslmode=require", Verify::Chain),
        ("postgres://h?sslmode=verify-ca", Verify::Chain),
        ("postgres://h?sslmode=verify-full", Verify::Full),
    ] {
        let endpoint = Endpoint::parse(url)
            .unwrap_or_else(|fault| panic!("{fault}"))
            .0;
        assert_eq!(secured(endpoint), Ok((Plain::Nowhere, expected)), "{url}");
    }
    for url in ["postgres://h?sslmode=disable", "postgres:///db?host=/tmp"] {
        let endpoint = Endpoint::parse(url)
            .unwrap_or_else(|fault| panic!("{fault}"))
            .0;
        assert!(secured(endpoint).is_err(), "{url}");
    }
    // The driver's default: not by chance in plain text.
    let config: tokio_postgres::Config = "host=localhost".parse().unwrap();
    let endpoint = || Endpoint::new(config.clone()).unwrap_or_else(|fault| panic!("{fault}"));
    assert_eq!(secured(endpoint()), Ok((Plain::Nowhere, Verify::Full)));
    let mut plain = endpoint();
    assert!(plain.secure().is_ok());
    assert_eq!(plain.security.plain, Plain::AtHome);
    let config: tokio_postgres::Config = "host=h target_session_attrs=read-only".parse().unwrap();
    assert!(Endpoint::new(config).is_err());
}

/// It was taken as it is, and a session panicked when it connected.
#[test]
fn the_time_for_connecting_of_a_config_is_within_bounds() {
    use std::time::Duration;
    for within in [Duration::ZERO, Duration::MAX] {
        let mut config = tokio_postgres::Config::new();
        config.host("127.0.0.1").port(1).connect_timeout(within);
        let refused = PostgresStore::from_config(config).connect_lazy();
        let refused = refused.expect_err("it cannot be used").to_string();
        assert!(refused.contains("1 ms to 24 h"), "{refused}");
    }
}
