// Table of runs: order, filter, columns, keys, runs to compare, and the window for tags and notes. The server sends
// rows that are new or have changed, and the order of all: incidents, live ones, latest. Another order, the filter, the
// hidden columns and the runs to compare are kept in the address.
window.overlapscope.startRuns = (sources) => {
  const element = (id) => document.getElementById(id)
  const table = document.querySelector("#runs table")
  const body = table.tBodies[0]
  const search = element("search")
  const query = new URLSearchParams(location.search)
  let names = sources.order.data.name
  let sorted = {key: query.get("sort"), isDescending: query.get("order") === "descending"}
  search.value = query.get("q") ?? ""

  const heads = new Map([...table.tHead.querySelectorAll("[data-key]")].map((head) => [head.dataset.key, head]))
  if (!heads.get(sorted.key)?.querySelector("button")) sorted = {key: null, isDescending: false}
  const rows = () => [...body.rows]
  const shown = () => rows().filter((row) => !row.hidden)
  const linkOf = (row) => row?.querySelector("a")

  // --- order and filter -----------------------------------------------------------------------------------------
  function valueOf(row, column) {
    const text = row.cells[column].dataset.value
    return text === "" || Number.isNaN(Number(text)) ? text.toLowerCase() : Number(text)
  }

  function compare(one, other) {
    if (one === other) return 0
    if (one === "" || other === "") return one === "" ? Infinity : -Infinity // unknown values are last, in any order
    if (typeof one === "number" && typeof other === "number") return one - other
    return String(one).localeCompare(String(other), undefined, {numeric: true})
  }

  function arranged() {
    const position = new Map(names.map((name, index) => [name, index]))
    const all = rows().sort((one, other) => position.get(one.dataset.name) - position.get(other.dataset.name))
    if (!sorted.key) return all
    const column = heads.get(sorted.key).cellIndex
    const sign = (by) => (sorted.isDescending && Number.isFinite(by) ? -by : by)
    return all.sort((one, other) => sign(compare(valueOf(one, column), valueOf(other, column))) || 0)
  }

  function textOf(row) {
    const parts = row.querySelectorAll("a, .badge, .tag, .note, small > span, td")
    return [...parts].map((part) => part.textContent).join(" ").replace(/\s+/g, " ").toLowerCase()
  }

  function filter() {
    const terms = search.value.toLowerCase().split(/\s+/).filter(Boolean)
    for (const row of rows()) {
      const text = textOf(row)
      row.hidden = !terms.every((term) => text.includes(term))
    }
    const [some, all] = [shown().length, body.rows.length]
    element("count").textContent = some === all ? `${all} run${all === 1 ? "" : "s"}` : `${some} of ${all} runs`
    element("no-match").hidden = some > 0
    element("none").hidden = all > 0
    element("runs").hidden = all === 0
  }

  function arrange() {
    const wanted = arranged()
    const focused = document.activeElement
    wanted.forEach((row, index) => {
      if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null)
    })
    if (focused !== document.activeElement && focused.isConnected) focused.focus({preventScroll: true})
    for (const [key, head] of heads) {
      if (key === sorted.key) head.ariaSort = sorted.isDescending ? "descending" : "ascending"
      else head.removeAttribute("aria-sort")
    }
    filter()
    showChosen()
  }

  function remember() {
    const order = sorted.key && sorted.isDescending ? "descending" : null
    window.overlapscope.setAddress({q: search.value.trim() || null, sort: sorted.key, order})
  }

  // A first click sorts, largest value or first letter first, a second click reverses, a third restores the default.
  function sortBy(key) {
    const isDescendingFirst = !["name", "model", "device", "verdict"].includes(key)
    if (sorted.key !== key) sorted = {key, isDescending: isDescendingFirst}
    else if (sorted.isDescending === isDescendingFirst) sorted = {key, isDescending: !isDescendingFirst}
    else sorted = {key: null, isDescending: false}
    arrange()
    remember()
  }

  function searchFor(text) {
    search.value = text
    filter()
    remember()
  }

  // --- updates while the page is open ---------------------------------------------------------------------------
  function rowOf(name) {
    return rows().find((row) => row.dataset.name === name)
  }

  function replaceRow(name, html) {
    const template = document.createElement("template")
    template.innerHTML = html.trim()
    const row = template.content.firstElementChild
    const old = rowOf(name)
    if (!old) return body.append(row)
    const index = [...old.querySelectorAll("a, button, input")].indexOf(document.activeElement)
    old.replaceWith(row)
    if (index >= 0) row.querySelectorAll("a, button, input")[index]?.focus({preventScroll: true})
  }

  function takeChanges() {
    const {name, html} = sources.changed.data
    name.forEach((each, index) => replaceRow(each, html[index]))
    names = [...names, ...name.filter((each) => !names.includes(each))]
    arrange()
  }

  function takeOrder() {
    names = sources.order.data.name
    for (const row of rows()) if (!names.includes(row.dataset.name)) row.remove()
    arrange()
  }

  // --- runs to compare ------------------------------------------------------------------------------------------
  // The run that is chosen first is the base of all others.
  let chosen = [query.get("base"), ...query.getAll("new")].filter(Boolean)

  function showChosen() {
    chosen = chosen.filter(rowOf)
    for (const row of rows()) {
      const index = chosen.indexOf(row.dataset.name)
      row.querySelector(".side").checked = index >= 0
      const badge = row.querySelector(".chosen")
      badge.hidden = index < 0
      badge.textContent = index === 0 ? "base" : chosen.length > 2 ? `new ${index}` : "new"
    }
    const [base, ...others] = chosen
    element("pair").hidden = !base
    element("pair-base").textContent = base ?? ""
    element("pair-new").textContent = others.join(", ") || "choose another run"
    element("pair-new").classList.toggle("missing", !others.length)
    element("pair-swap").hidden = others.length > 1
    element("pair-swap").disabled = !others.length
    const runOf = (name) => rowOf(name).dataset.run
    const compared = others.map((name) => `&new=${runOf(name)}`).join("")
    if (compared) element("pair-open").href = `compare?base=${runOf(base)}${compared}`
    else element("pair-open").removeAttribute("href")
  }

  function choose(names) {
    chosen = names
    showChosen()
    window.overlapscope.setAddress({base: chosen[0] ?? null, new: chosen.slice(1)})
  }

  function toggle(name) {
    choose(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name])
  }

  const clickSide = () => document.activeElement.closest?.("tbody tr")?.querySelector(".side").click()

  // --- which columns are shown ----------------------------------------------------------------------------------
  const columnsKey = "overlapscope-hidden-columns"
  const columnStyle = document.head.appendChild(document.createElement("style"))
  const columnBoxes = [...element("columns").querySelectorAll("input")]

  function storedColumns() {
    try {
      return localStorage.getItem(columnsKey)
    } catch {
      return null // Private windows may refuse; then the address alone keeps the choice.
    }
  }

  function hideColumns(keys) {
    const known = keys.filter((key) => heads.has(key) && key !== "name")
    for (const box of columnBoxes) box.checked = !known.includes(box.value)
    columnStyle.textContent = known.map((key) => `.column-${key}.column-${key} { display: none; }`).join("\n")
  }

  function chooseColumns() {
    const hidden = columnBoxes.filter((box) => !box.checked).map((box) => box.value)
    hideColumns(hidden)
    window.overlapscope.setAddress({hide: hidden.join(",") || null})
    try {
      localStorage.setItem(columnsKey, hidden.join(","))
    } catch {
      // As above.
    }
  }

  hideColumns((query.get("hide") ?? storedColumns() ?? "").split(","))
  element("columns").addEventListener("change", chooseColumns)

  // --- tags and notes -------------------------------------------------------------------------------------------
  const dialog = element("notes")
  let edited = null
  let wanted = 0

  function fail(text) {
    element("notes-error").textContent = text
    element("notes-error").hidden = !text
  }

  function edit(row) {
    edited = {...row.dataset}
    element("notes-of").textContent = edited.name
    element("notes-tags").value = edited.tags
    element("notes-note").value = edited.note
    fail("")
    element("notes-save").disabled = false
    dialog.showModal()
  }

  function save(event) {
    event?.preventDefault()
    element("notes-save").disabled = true
    wanted += 1
    sources.wanted.data = {
      id: [wanted],
      name: [edited.name],
      tags: [element("notes-tags").value],
      note: [element("notes-note").value],
      seen_tags: [edited.tags],
      seen_note: [edited.note],
    }
  }

  function saved() {
    const {id, error} = sources.answer.data
    if (id[0] !== wanted) return
    element("notes-save").disabled = false
    if (error[0]) return fail(`${error[0][0].toUpperCase()}${error[0].slice(1)}.`)
    dialog.close()
    rowOf(edited.name)?.querySelector(".edit").focus()
  }

  // --- keys and wiring ------------------------------------------------------------------------------------------
  function step(by) {
    const all = shown()
    const index = all.indexOf(document.activeElement.closest?.("tbody tr"))
    const next = index < 0 ? (by > 0 ? 0 : all.length - 1) : index + by
    if (next < 0) search.focus()
    else linkOf(all[Math.min(next, all.length - 1)])?.focus()
  }

  window.overlapscope.onKeys({
    "/": () => search.focus(),
    c: () => (chosen.length > 1 ? element("pair-open").click() : clickSide()),
    x: clickSide,
    ArrowDown: () => step(1),
    ArrowUp: () => step(-1),
  })
  search.addEventListener("input", () => searchFor(search.value))
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") step(1)
    else if (event.key === "Enter") linkOf(shown()[0])?.focus()
    else if (event.key === "Escape") searchFor("")
    else return
    event.preventDefault()
  })
  for (const [key, head] of heads) head.querySelector("button")?.addEventListener("click", () => sortBy(key))
  body.addEventListener("click", ({target}) => {
    const tag = target.closest("[data-tag]")
    if (tag) searchFor(tag.dataset.tag)
    else if (target.closest("[data-edit]")) edit(target.closest("tr"))
    else if (target.matches(".side")) toggle(target.closest("tr").dataset.name)
  })
  element("pair-swap").addEventListener("click", () => choose([...chosen].reverse()))
  element("pair-clear").addEventListener("click", () => choose([]))
  element("clear").addEventListener("click", () => searchFor(""))
  element("notes-cancel").addEventListener("click", () => dialog.close())
  dialog.addEventListener("submit", save)
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(event)
  })
  const {on} = window.overlapscope
  on(sources.changed, "data", takeChanges)
  on(sources.order, "data", takeOrder)
  on(sources.answer, "data", saved)

  arrange()
  document.body.dataset.ready = "yes"
}
