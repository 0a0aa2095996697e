mod ledger;
mod wire;
