import { render } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import "./page.css";
import { Away, Refused, get, post, type Session } from "./api";
import { useLive, type Live } from "./live";
import { Command, Notice, Name, clock, zone } from "./text";
import { WorkBar, useWork, type Work } from "./work";
import { OverviewView } from "./overview";
import { EventView } from "./event";
import { DeadView } from "./dead";
import { AggregatesView, DoctorView, RetentionView } from "./views";

/** What every view gets. */
export interface Shown {
  session: Session;
  live: Live;
  work: Work;
  query: URLSearchParams;
  go: (to: string) => void;
}

const VIEWS: { path: string; name: string; view: (shown: Shown) => preact.JSX.Element; whole?: boolean }[] = [
  { path: "/", name: "Overview", view: OverviewView },
  { path: "/event", name: "Event", view: EventView },
  { path: "/dead", name: "Dead letters", view: DeadView },
  { path: "/aggregates", name: "Aggregates", view: AggregatesView },
  { path: "/retention", name: "Retention", view: RetentionView, whole: true },
  { path: "/doctor", name: "Doctor", view: DoctorView, whole: true },
];

type Visit = { is: "asking" } | { is: "away" } | { is: "refused"; why: string } | { is: "login" } | { is: "in"; session: Session };

function useVisit(): [Visit, () => void] {
  const [visit, setVisit] = useState<Visit>({ is: "asking" });
  const ask = useCallback(() => {
    get<Session>("/v1/session").then(
      (session) => setVisit({ is: "in", session }),
      (error) => {
        if (error instanceof Refused && error.status === 401) setVisit({ is: "login" });
        else if (error instanceof Away) {
          setVisit((old) => (old.is === "in" ? old : { is: "away" }));
          setTimeout(ask, 2000);
        } else setVisit({ is: "refused", why: error.message });
      },
    );
  }, []);
  useEffect(ask, []);
  return [visit, ask];
}

function Page() {
  const [visit, ask] = useVisit();
  const [place, setPlace] = useState(location.pathname + location.search);
  const heading = useRef<HTMLElement>(null);
  const go = useCallback((to: string) => {
    history.pushState(null, "", to);
    setPlace(to);
    scrollTo(0, 0);
    heading.current?.focus();
  }, []);
  useEffect(() => {
    const moved = () => setPlace(location.pathname + location.search);
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  const session = visit.is === "in" ? visit.session : null;
  const mayLook = session?.role === "admin";
  const live = useLive(mayLook, ask);
  const work = useWork();
  const url = new URL(place, location.origin);
  const view = VIEWS.find((view) => view.path === url.pathname) ?? VIEWS[0];
  useEffect(() => {
    document.title = `${view.name} · hapax`;
  }, [view]);
  /** Links of this page do not load it again. */
  const follow = (event: MouseEvent) => {
    const link = (event.target as Element).closest("a");
    if (!link || event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    if (link.origin !== location.origin || link.hash !== "" || !VIEWS.some((view) => view.path === link.pathname)) return;
    event.preventDefault();
    go(link.pathname + link.search);
  };
  const logout = () => {
    work.close();
    post("/v1/logout").then(ask, ask);
  };
  const shown = VIEWS.filter((view) => session?.whole || !view.whole);
  return (
    <div class="frame" onClick={follow}>
      <a class="skip" href="#main">Skip to the content</a>
      <header>
        <a class="brand" href="/">hapax</a>
        {mayLook && (
          <nav aria-label="Views">
            {shown.map(({ path, name }) => (
              <a key={path} href={path} aria-current={path === view.path ? "page" : undefined}>{name}</a>
            ))}
          </nav>
        )}
        <div class="visitor">
          {mayLook && <State live={live} />}
          {session && !session.local && (
            <span class="who"><Name of={session.who} /> <button type="button" class="quiet" onClick={logout} disabled={work.running}>Log out</button></span>
          )}
        </div>
      </header>
      {live.lostSince !== null && (
        <Notice kind="bad">
          <strong>The server does not answer</strong> since <span class="number">{clock(new Date(live.lostSince))}</span>{" "}
          {zone(new Date(live.lostSince))}. What you see is from before. The page asks again by itself.
        </Notice>
      )}
      {session && <WorkBar work={work} />}
      {live.problem && <Notice kind="warn">The numbers cannot be read: {live.problem}</Notice>}
      <main id="main" tabIndex={-1} ref={heading}>
        {visit.is === "asking" && <p class="loading">Loading…</p>}
        {visit.is === "away" && <Notice kind="bad"><strong>The server does not answer.</strong> The page asks again by itself.</Notice>}
        {visit.is === "refused" && <Notice kind="bad">{visit.why}</Notice>}
        {visit.is === "login" && <Login done={ask} />}
        {session && !mayLook && (
          <Notice kind="warn">This page is for operators: it needs a token with the role admin, and this one has the role {session.role}.</Notice>
        )}
        {session && mayLook && view.whole && !session.whole && (
          <Notice kind="warn">{view.name} is about all tenants and scopes: it needs a token without a tenant and for all scopes.</Notice>
        )}
        {session && mayLook && (session.whole || !view.whole) && (
          <view.view key={view.path} session={session} live={live} work={work} query={url.searchParams} go={go} />
        )}
      </main>
      {session && <footer>hapax {session.version}{session.tenant && <> · tenant <Name of={session.tenant} /></>}</footer>}
    </div>
  );
}

/** Each view says of when its data are. */
function State({ live }: { live: Live }) {
  const [word, kind] = live.lostSince !== null ? ["Lost", "bad"] : live.samples.length > 0 ? ["Live", "good"]
    : live.counting !== null ? ["Counting", "warn"] : ["Connecting", "warn"];
  return (
    <span class="state">
      <span class={`dot ${kind}`} aria-hidden="true" /> {word}
    </span>
  );
}

function Login({ done }: { done: () => void }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState<string | null>(null);
  const login = (event: Event) => {
    event.preventDefault();
    setError(null);
    post("/v1/login", { token }).then(() => {
      setToken("");
      done();
    }, (error) => setError(error.message));
  };
  return (
    <section class="login">
      <h1>Log in</h1>
      <p>This server asks who calls. The token stays in a cookie that no script can read, until the browser is closed.</p>
      <form onSubmit={login}>
        <label for="token">Token with the role admin</label>
        <input id="token" type="password" autocomplete="off" spellcheck={false} required placeholder="hpx_…" value={token}
          onInput={(event) => setToken(event.currentTarget.value)} />
        <button type="submit">Log in</button>
      </form>
      {error && <Notice kind="bad">{error}</Notice>}
      <Command label="Make one" line="hapax token create --name NAME --role admin" />
    </section>
  );
}

const root = document.getElementById("page")!;
root.textContent = "";
render(<Page />, root);
