//! The attribute `#[with_lock]` of [`lockstream`](https://docs.rs/lockstream), which has it behind
//! its feature `macros`. Use it from there: this crate is of no use alone.

mod duration;
mod expand;
mod function;
mod key;
mod options;
mod returns;

use proc_macro::TokenStream;
use quote::quote;

use self::function::Function;
use self::options::Options;

/// Docs.
#[proc_macro_attribute]
pub fn with_lock(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let item_tokens = proc_macro2::TokenStream::from(item.clone());
    let result = (|| {
        let mut function: Function = syn::parse(item)?;
        let mut locks = vec![syn::parse::<Options>(arguments)?];
        locks.extend(function.take_further_locks()?);
        expand::expand(&function, &locks)
    })();
    result
        .unwrap_or_else(|error| {
            let error = error.into_compile_error();
            quote!(#error #item_tokens)
        })
        .into()
}
