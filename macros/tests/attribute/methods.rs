//! Methods, with each form of `self`.

use std::pin::Pin;
use std::sync::Arc;

use futures::stream::BoxStream;
use futures::{Stream, TryStreamExt};
use lockstream::{LockError, LockRegistry, with_lock};

use crate::{ShopError, held};

#[derive(Clone)]
struct Shop {
    locks: LockRegistry,
    shard: u32,
    sold: u32,
}

impl Shop {
    const DESK: &str = "desk";

    fn new() -> Self {
        let locks = LockRegistry::in_memory();
        Self {
            locks,
            shard: 3,
            sold: 0,
        }
    }

    const fn number(&self) -> u32 {
        self.shard
    }

    async fn is_held(&self) -> bool {
        held(&self.locks, "shard:3").await
    }

    #[with_lock(key = "shard:{self.shard}", registry = self.locks)]
    pub(crate) async fn by_ref(&self) -> Result<bool, LockError> {
        Ok(self.is_held().await)
    }

    #[with_lock(key = "shard:{self.number()}", registry = &self.locks)]
    async fn by_mut(&mut self) -> Result<bool, ShopError> {
        self.sold += 1;
        Ok(self.is_held().await)
    }

    #[with_lock(key = "shard:{self.shard}", registry = self.locks)]
    async fn by_value(mut self) -> Result<(bool, u32), ShopError> {
        self.sold += 1;
        Ok((self.is_held().await, self.sold))
    }

    #[with_lock(key = "shard:{self.shard}", registry = self.locks)]
    async fn by_arc(self: Arc<Self>) -> Result<bool, ShopError> {
        Ok(self.is_held().await)
    }

    #[with_lock(key = "shard:{self.shard}", registry = self.locks)]
    async fn by_pin(self: Pin<&mut Self>) -> Result<bool, ShopError> {
        Ok(self.is_held().await)
    }

    #[with_lock(key = "{Self::DESK}:{shop.shard}", registry = shop.locks)]
    async fn without_self(shop: &Self) -> Result<bool, ShopError> {
        Ok(held(&shop.locks, "desk:3").await)
    }

    #[with_lock(key = "{name}", registry = self.locks)]
    async fn lent(&mut self, name: &str) -> Result<&mut u32, LockError> {
        self.sold += u32::from(held(&self.locks, name).await);
        Ok(&mut self.sold)
    }

    #[with_lock(key = "shard:{shard}", registry = locks)]
    async fn made(
        locks: &LockRegistry,
        shard: u32,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync + '_>> {
        let locks = locks.clone();
        let sold = u32::from(held(&locks, "shard:3").await);
        Ok(Self { locks, shard, sold })
    }

    #[with_lock(key = "shard:{self.shard}", registry = self.locks)]
    fn seen(&self) -> impl Stream<Item = Result<bool, ShopError>> + '_ {
        futures::stream::once(async { Ok(self.is_held().await) })
    }

    #[with_lock(key = "shard:{self.shard}", registry = self.locks)]
    fn seen_boxed(&mut self) -> BoxStream<'_, Result<bool, ShopError>> {
        self.sold += 1;
        Box::pin(futures::stream::once(async { Ok(self.is_held().await) }))
    }
}

#[tokio::test(start_paused = true)]
async fn each_form_of_self() {
    let mut shop = Shop::new();
    assert!(shop.by_ref().await.unwrap());
    assert!(shop.by_mut().await.unwrap());
    assert_eq!(shop.sold, 1);
    assert_eq!(shop.clone().by_value().await.unwrap(), (true, 2));
    assert!(Arc::new(shop.clone()).by_arc().await.unwrap());
    assert!(Pin::new(&mut shop).by_pin().await.unwrap());
    assert!(Shop::without_self(&shop).await.unwrap());
    assert_eq!(shop.seen().try_collect::<Vec<_>>().await.unwrap(), [true]);
    let seen: Vec<bool> = shop.seen_boxed().try_collect().await.unwrap();
    assert_eq!((seen, shop.sold), (vec![true], 2));
    assert!(!shop.is_held().await);
    assert!(!held(&shop.locks, "desk:3").await);
}

#[tokio::test(start_paused = true)]
async fn what_borrows_from_the_arguments() {
    let mut shop = Shop::new();
    *shop.lent("lent").await.unwrap() += 1;
    assert_eq!(shop.sold, 2);
    let made = Shop::made(&shop.locks, 3).await.unwrap();
    assert_eq!(made.sold, 1);
}

trait Seller {
    fn locks(&self) -> &LockRegistry;

    #[with_lock(key = "seller", registry = self.locks())]
    async fn sell(&self) -> Result<bool, LockError> {
        Ok(held(self.locks(), "seller").await)
    }

    async fn resell(&self) -> Result<bool, LockError>;
}

impl Seller for Shop {
    fn locks(&self) -> &LockRegistry {
        &self.locks
    }

    #[with_lock(key = "reseller", registry = self.locks)]
    async fn resell(&self) -> Result<bool, LockError> {
        Ok(held(&self.locks, "reseller").await)
    }
}

#[tokio::test(start_paused = true)]
async fn methods_of_traits() {
    let shop = Shop::new();
    assert!(shop.sell().await.unwrap());
    assert!(shop.resell().await.unwrap());
    assert!(!held(&shop.locks, "seller").await);
    assert!(!held(&shop.locks, "reseller").await);
}
