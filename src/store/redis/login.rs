//! The first commands of a connection: the protocol, the user and the database.

use std::io;

use redis::{
    Cmd, ErrorKind, ProtocolVersion, RedisConnectionInfo, RedisError, RedisResult, Value, cmd,
};

use super::fault::Fault;
use super::link::Link;

/// What a server tells the operator of who is connected.
const LIBRARY: &str = "lockstream";

/// The answer of a server that knows passwords, and no users.
const NO_USERS: &str = "wrong number of arguments for 'auth' command";

pub(super) async fn log_in<T>(
    link: &mut Link<T>,
    settings: &RedisConnectionInfo,
) -> RedisResult<()> {
    let user = settings.username();
    match try_log_in(link, settings, user).await? {
        Err(error) if user.is_some() && error.detail().is_some_and(|it| it.contains(NO_USERS)) => {
            try_log_in(link, settings, None)
                .await?
                .map_err(|_| refused())
        }
        Err(_) if settings.protocol() == ProtocolVersion::RESP2 => Err(refused()),
        logged_in => logged_in,
    }
}

/// The inner error says that the user was refused.
async fn try_log_in<T>(
    link: &mut Link<T>,
    settings: &RedisConnectionInfo,
    user: Option<&str>,
) -> RedisResult<RedisResult<()>> {
    let mut commands = Vec::new();
    let login = login(settings, user);
    let logs_in = login.is_some();
    commands.extend(login);
    let selects = settings.db() != 0;
    if selects {
        commands.push(cmd("SELECT").arg(settings.db()).take());
    }
    if !settings.skip_set_lib_name() {
        // Servers before 7.2 do not know it.
        let name = settings.lib_name().unwrap_or(LIBRARY);
        for (what, word) in [("LIB-NAME", name), ("LIB-VER", env!("CARGO_PKG_VERSION"))] {
            commands.push(cmd("CLIENT").arg(&["SETINFO", what, word]).take());
        }
    }
    let answers = link.answers(&commands).await;
    let answers = answers.map_err(|fault| match fault {
        Fault::Broken { source, .. } => source,
        Fault::Closed { .. } => io::Error::from(io::ErrorKind::UnexpectedEof).into(),
        other => io::Error::other(other).into(),
    });
    let mut answers = answers?.into_iter();
    if logs_in && let Some(Value::ServerError(error)) = answers.next() {
        return Ok(Err(error.into()));
    }
    if selects && let Some(Value::ServerError(error)) = answers.next() {
        return Err(error.into());
    }
    Ok(Ok(()))
}

/// The command that says which protocol we speak and who we are, if there is one.
fn login(settings: &RedisConnectionInfo, user: Option<&str>) -> Option<Cmd> {
    let password = settings.password();
    if settings.protocol() == ProtocolVersion::RESP3 {
        let mut hello = cmd("HELLO");
        hello.arg("3");
        if let Some(password) = password {
            hello.arg(&["AUTH", user.unwrap_or("default"), password]);
        }
        return Some(hello);
    }
    let mut auth = cmd("AUTH");
    auth.arg(user).arg(password?);
    Some(auth)
}

/// The server's text may quote the password.
fn refused() -> RedisError {
    (ErrorKind::AuthenticationFailed, "authentication failed").into()
}
