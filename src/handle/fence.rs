//! Transactions that commit only while a lease holds.

use std::sync::Arc;

use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use crate::base::{LockError, LossCause, StoreError, Token};
use crate::handle::LeaseView;
use crate::store::fence_error;

/// The statement that fences a transaction by the lease of one key, for any driver; of [`LeaseView::fence_sql`].
#[derive(Clone, Debug)]
pub struct FenceSql {
    text: Arc<str>,
    key: Arc<str>,
    /// None if the lease had ended before its token was asked for: others may work under the same epoch (F4).
    token: Option<Token>,
    prefix: Arc<str>,
}

impl FenceSql {
    /// The SQLSTATE of the error if the lease is over: then the transaction must not commit, and cannot.
    pub const REFUSED: &'static str = "LS001";

    /// The text of the statement. It has three parameters, `$1` to `$3`: [`key`](Self::key), [`token`](Self::token) and
    /// [`prefix`](Self::prefix).
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// `$1`, a `text`: the key.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// `$2`, a `bigint`: the fencing token of the lease on this key. 0, which the statement refuses, if the lease had ended
    /// before anybody asked for its token.
    #[must_use]
    pub fn token(&self) -> i64 {
        self.token.map_or(0, Token::as_i64)
    }

    /// `$3`, a `text`: the prefix of the lease's registry.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

impl LeaseView {
    /// Fences a transaction in the database of a [`PostgresStore`](crate::store::PostgresStore): it commits only if this
    /// lease still has its lock, and nobody else gets the lock before it has ended. Of several keys, all of them.
    ///
    /// Call it first in each transaction; a lease may have many. When the lease is over, it fails, and the transaction cannot
    /// commit. Nothing is checked after it. If the lease runs out while the transaction goes on, the transaction may still
    /// commit: nobody else gets the lock before its end. So one that never ends keeps the lock: set
    /// `idle_in_transaction_session_timeout`, to some ttls. The lease is renewed meanwhile. In work that is dropped at a loss
    /// ([`OnLost::Stop`](crate::OnLost::Stop)) the transaction is dropped with it, and rolled back. Inside a savepoint that
    /// is rolled back it fences nothing. For another client than `tokio-postgres` there is [`fence_sql`](Self::fence_sql).
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lease is over. [`LockError::Store`] if the store is another one, or the server refuses: at
    /// REPEATABLE READ and SERIALIZABLE also (SQLSTATE 40001) if the lease has ended, or was taken or renewed, since the
    /// transaction's first statement. [`LockError::Closed`] if the registry is gone. The transaction must be rolled back
    /// then. If you commit it all the same, the server rolls back, but `commit` of `tokio-postgres` says `Ok`.
    ///
    /// # Cancel safety
    ///
    /// As a query of `tokio-postgres`: dropped once it was sent, it may fence the transaction all the same.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use lockstream::LockRegistry;
    ///
    /// # async fn f(locks: LockRegistry, client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let lease = locks.obtain("order:42").lease().await?;
    /// let transaction = client.transaction().await?;
    /// lease.view().fence(&transaction).await?;
    /// transaction.execute("UPDATE orders SET paid = true WHERE id = 42", &[]).await?;
    /// transaction.commit().await?;
    /// // Or around the work:
    /// let order = locks.obtain("order:43");
    /// let paid = order.try_with_lease(async |lease| {
    ///     let transaction = client.transaction().await?;
    ///     lease.fence(&transaction).await?;
    ///     transaction.execute("UPDATE orders SET paid = true WHERE id = 43", &[]).await?;
    ///     transaction.commit().await?;
    ///     Ok::<_, Box<dyn std::error::Error>>(())
    /// });
    /// paid.await?;
    /// # Ok(()) }
    /// ```
    #[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
    pub async fn fence(
        &self,
        transaction: &tokio_postgres::Transaction<'_>,
    ) -> Result<(), LockError> {
        for member in self.members() {
            let fence = member.fence_one()?;
            let arguments = [
                (
                    &fence.key() as &(dyn tokio_postgres::types::ToSql + Sync),
                    Type::TEXT,
                ),
                (&fence.token(), Type::INT8),
                (&fence.prefix(), Type::TEXT),
            ];
            let fenced = transaction.query_typed(fence.text(), &arguments).await;
            fenced.map_err(|error| {
                let key = fence.key.clone();
                if error.code().map(SqlState::code) == Some(FenceSql::REFUSED) {
                    let token = member.told_token();
                    let cause = match member.loss() {
                        Some(LockError::Lost { cause, .. }) => cause,
                        _ if fence.token.is_none() => LossCause::Ended,
                        _ => LossCause::Taken,
                    };
                    return LockError::Lost { key, token, cause };
                }
                let source = fence_error(&error);
                LockError::Store { key, source }
            })?;
        }
        Ok(())
    }

    /// What [`fence`](Self::fence) executes, for another driver: a statement and its arguments for each key of the lease.
    ///
    /// Execute all of them first in the transaction. One whose lease is over fails with the SQLSTATE
    /// [`FenceSql::REFUSED`], and the transaction cannot commit then.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the lease's store is another one than a [`PostgresStore`](crate::store::PostgresStore);
    /// [`LockError::Closed`] if the registry is gone.
    ///
    /// # Examples
    ///
    /// With sqlx:
    ///
    /// ```ignore
    /// let mut transaction = pool.begin().await?;
    /// for fence in lease.fence_sql()? {
    ///     let query = sqlx::query(fence.text()).bind(fence.key()).bind(fence.token()).bind(fence.prefix());
    ///     query.execute(&mut *transaction).await?;
    /// }
    /// ```
    ///
    /// With any client:
    ///
    /// ```no_run
    /// # async fn f(locks: lockstream::LockRegistry) -> Result<(), lockstream::LockError> {
    /// let lease = locks.obtain_all(["account:3", "account:7"]).lease().await?;
    /// for fence in lease.view().fence_sql()? {
    ///     println!("{} with {}, {}, {}", fence.text(), fence.key(), fence.token(), fence.prefix());
    /// }
    /// # Ok(()) }
    /// ```
    #[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
    pub fn fence_sql(&self) -> Result<Vec<FenceSql>, LockError> {
        self.members().iter().map(Self::fence_one).collect()
    }

    /// That of a lease of one key.
    fn fence_one(&self) -> Result<FenceSql, LockError> {
        let key = self.caller().key().clone();
        let context = self.context();
        let Some(text) = context.fence.clone() else {
            let why = "its store has no transactions: fences are of PostgresStore";
            let source = StoreError::lasting(why);
            return Err(LockError::Store { key, source });
        };
        let Some(engine) = context.engine.upgrade() else {
            return Err(LockError::Closed { key });
        };
        Ok(FenceSql {
            text,
            key,
            token: engine.see_token(self.caller()).then(|| self.told_token()),
            prefix: engine.settings.prefix.clone(),
        })
    }
}
