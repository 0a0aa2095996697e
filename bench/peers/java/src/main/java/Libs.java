import java.util.concurrent.locks.Lock;
import java.util.function.Function;
import org.redisson.Redisson;
import org.redisson.config.Config;
import org.springframework.data.redis.connection.lettuce.LettuceConnectionFactory;
import org.springframework.integration.redis.util.RedisLockRegistry;
import org.springframework.integration.redis.util.RedisLockRegistry.RedisLockType;
import org.springframework.scheduling.concurrent.ThreadPoolTaskScheduler;

/** Each library, set up as its own pages do for a service with one server: a lock for a key. None tells of a loss. */
class Libs {
    static Function<String, Lock> open(String lib, int port, long ttl) {
        switch (lib) {
            case "redisson", "redisson-fair", "redisson-spin", "redisson-fenced": {
                // https://redisson.pro/docs/data-and-services/locks-and-synchronizers/: without a lease time a watchdog
                // renews, for lockWatchdogTimeout at a time.
                var config = new Config();
                config.setLockWatchdogTimeout(ttl);
                config.useSingleServer().setAddress("redis://127.0.0.1:" + port);
                var redisson = Redisson.create(config);
                return switch (lib) {
                    case "redisson-fair" -> redisson::getFairLock;
                    case "redisson-spin" -> redisson::getSpinLock;
                    case "redisson-fenced" -> redisson::getFencedLock;
                    default -> redisson::getLock;
                };
            }
            case "spring", "spring-pubsub": {
                // https://docs.spring.io/spring-integration/reference/redis.html#redis-lock-registry: with a scheduler it
                // renews, which has been there since 6.4.
                var connections = new LettuceConnectionFactory("127.0.0.1", port);
                connections.afterPropertiesSet();
                connections.start();
                var registry = new RedisLockRegistry(connections, "peers", ttl);
                if (lib.equals("spring-pubsub")) {
                    registry.setRedisLockType(RedisLockType.PUB_SUB_LOCK);
                }
                var scheduler = new ThreadPoolTaskScheduler();
                scheduler.setDaemon(true);
                scheduler.initialize();
                registry.setRenewalTaskScheduler(scheduler);
                return registry::obtain;
            }
            default:
                throw new IllegalArgumentException("no such library: " + lib);
        }
    }
}
